"""What `import torch` runs through the entry point `torch.backends`.

A program that has Shoal installed and has not asked for it is a *guest*: torch must behave as if Shoal
were not there. So this package stands outside of `shoal`, and where another accelerator is usable it
imports nothing of it: a program that imports `shoal` has thereby asked for the device's name.

Nothing here may break `import torch`, take long, or look further than the environment and two or three
paths.
"""

from __future__ import annotations

import glob
import os
import sys
import warnings

#: Device files that exist where a driver runs, by torch's name of the accelerator.
_DEVICE_FILES = {
    "cuda": ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd"),
    "xpu": ("/dev/dri/renderD*",),
}
#: What declines in SHOAL_DEFAULT.
_NO = ("0", "false", "no", "off")
#: Variables that hide all accelerators of a kind if they are empty or negative.
_VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}


def identity_file() -> str:
    """What `shoal join` writes: $SHOAL_IDENTITY, else under $XDG_CONFIG_HOME."""
    chosen = os.environ.get("SHOAL_IDENTITY")
    if chosen is not None:
        return chosen
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(base, "shoal", "identity.pem")


def declined() -> bool:
    """Whether the user wants programs to be guests, whatever was joined: SHOAL_DEFAULT=0."""
    return os.environ.get("SHOAL_DEFAULT", "").strip().lower() in _NO


def asked() -> str:
    """How the user asked for a pool: SHOAL_DEFAULT, SHOAL_POOL or `shoal join`; "" if not at all."""
    if declined():
        return ""
    for variable in ("SHOAL_DEFAULT", "SHOAL_POOL"):
        if os.environ.get(variable):
            return variable
    return "shoal join" if os.path.exists(identity_file()) else ""


def other_accelerator() -> str:
    """The accelerator that this torch can use here: "cuda", "xpu" or "". No driver is asked.

    Asking one would start it, and a process that starts CUDA cannot be forked any more.
    """
    import torch

    built = {"cuda": torch.cuda._is_compiled(), "xpu": torch.xpu._is_compiled()}
    for kind, patterns in _DEVICE_FILES.items():
        hidden = any(os.environ.get(name, "all") in ("", "-1") for name in _VISIBLE[kind])
        if built[kind] and not hidden and any(glob.glob(pattern) for pattern in patterns):
            return kind
    return ""


def autoload() -> None:
    """Makes `torch.device("shoal")` known. Catches everything: torch must import without us."""
    try:
        if other_accelerator() and not asked() and "shoal" not in sys.modules:
            return
        from shoal.device import registration

        registration.register()
    except Exception as error:
        warnings.warn(
            f"shoal could not register its torch device ({type(error).__name__}: {error}); torch "
            "works without it. Run `python -m shoal_autoload` to see the whole error.",
            RuntimeWarning,
            stacklevel=2,
        )
