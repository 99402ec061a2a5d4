"""Small programs of users, one file per library.

Each function is one case: `run(cpu)` of `tests.ecosystem.case` calls it in a process of its own. With
`cpu` the program tells the library to use the CPU. A case imports its library before torch where a
user would. It returns the device it ran on and what it computed.
"""
