"""What every process of a pool uses: paths, child processes, log lines and limits."""
