"""`python -m shoal_autoload`: registers the device and shows the whole error if that fails."""

from __future__ import annotations

from shoal.device import registration

registration.register()
print("shoal's device is registered with torch")
