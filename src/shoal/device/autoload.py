"""What `import torch` runs through the entry point `torch.backends`.

It must never break `import torch` and never do I/O: it names the device, loads the core and adds the
module `torch.shoal`. Everything else waits for the first use.
"""

from __future__ import annotations

import warnings


def autoload() -> None:
    """Makes `torch.device("shoal")` known. Catches everything: torch must import without us."""
    try:
        from shoal.device import registration

        registration.register()
    except Exception as error:
        warnings.warn(
            f"shoal could not register its torch device ({type(error).__name__}: {error}); torch "
            "works without it. Run `python -m shoal.device.autoload` to see the whole error.",
            RuntimeWarning,
            stacklevel=2,
        )


if __name__ == "__main__":
    from shoal.device import registration

    registration.register()
    print("shoal's device is registered with torch")
