"""What the core and processes without torch must agree on (csrc/constants)."""

SESSIONS_MAX: int  # the largest session number
DEVICES_PER_LEASE_MAX: int
TORCH_VERSION: str  # the release of torch that the core was built for
DATA_MAGIC: bytes  # the first bytes of a data connection
SHARE_CONTROL_BYTES: int  # of the page that says who may use shared memory
SHARE_REVOKED_WORD: int
SHARE_HOLDER_WORD: int
