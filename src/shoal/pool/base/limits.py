"""Every limit and deadline of the control plane, in one place."""

from __future__ import annotations

PORT = 7433  # of a head that listens

# --- sizes --------------------------------

FRAME_BYTES_MAX = 256 * 1024
ANSWER_BYTES_MAX = 2 * 2**20  # of a head to its client: thousands of devices and sessions
ANONYMOUS_FRAME_BYTES_MAX = 8 * 1024  # a join request is under 2 KiB
OUTGOING_BYTES_MAX = 4 * 2**20  # what waits for a peer that does not read, before it is dropped
NAME_CHARS_MAX = 64
TEXT_CHARS_MAX = 2000
SESSIONS_MAX = 2047  # session numbers are eleven bits of an address, and 0 is none
DEVICES_PER_NODE_MAX = 64
ENDED_PER_NODE_MAX = (
    100  # ends that a node tells when its head is back: with texts they fit a frame
)
PROFILES_PER_PAGE = 200  # of an answer; a profile is at most some KiB
DEVICES_PER_LEASE_MAX = 32  # as many members as the core's address space can have

DIMENSIONS_MAX = 64  # of a tensor: torch's own limit
SHARES_MAX = 4096  # of a node
SHARES_PER_LEASE_MAX = 1024
SHARE_PARTICIPANTS_MAX = 64  # programs that have one open, its owner among them
SHARES_LISTED_MAX = 200
SHARE_VISITORS_MAX = 256  # those that wait for their turn among them

# --- reading data at a node ----------------

READER_BYTES = 128 * 2**20  # of the memory in which a reader puts samples; used pages only cost
READ_SAMPLES_MAX = 2**14  # of one request: with the rest it fits a frame
READS_MAX = 256  # requests that a reader has before it
DATA_SOURCES_MAX = 64  # open at a reader
DATA_PATHS_MAX = 64  # of one source
DATA_PATH_CHARS_MAX = 2048
DATA_FOLDERS_MAX = 32  # that a node serves
DATA_LEAVES_MAX = 1024  # tensors of a sample, columns of a table
DATA_RUNS_MAX = 2**14

# --- connections --------------------------------

CONNECT_S = 4.0  # a client tries this long to reach a server, TLS handshake included
HANDSHAKE_S = 5.0  # from accept to a finished TLS handshake
FIRST_FRAME_S = 5.0  # from there to the first whole request
FRAME_S = 5.0  # from a frame's first byte to its last
ANSWER_S = (
    60.0  # a client waits this long: the first import of torch from a cold disk takes a while
)
IDLE_S = 120.0  # a client without a lease that says nothing
CONNECTIONS_MAX = 1024
STRANGERS_MAX = 64  # connections that have not shown who they are
STRANGERS_PER_ADDRESS_MAX = 16

# --- who is alive --------------------------------

BEAT_S = 1.0
SILENCE_S = 4.0  # no beat for this long: the node (or, to a client or agent, the head) is lost
LEASE_SILENCE_S = 30.0  # a client elsewhere with a lease that says nothing: it is taken for gone
GRANT_S = 3.0  # from a grant to its device server's word that it has it
RECOVERY_S = 4.0  # a request waits this long for a device server that is starting again
RESUME_S = 10.0  # a client that lost its connection comes back within this, or its lease ends
RETRY_S = 0.25
REFUSED_S = 2.0  # between tries of an agent that the head refuses
RESTART_BACKOFF_MAX_S = 5.0
START_ATTEMPTS_MAX = 3  # of a device server that has never been ready
WORKED_S = 1.0  # a process that lived this long did not fail to start

# --- joining --------------------------------

CODE_TTL_S = 600.0
CODES_MAX = 1000  # unused and unexpired at once
WRONG_CODES_PER_ADDRESS = 10  # then one more every WRONG_CODE_REFILL_S
WRONG_CODE_REFILL_S = 6.0
WRONG_CODES_TOGETHER = 200  # from everywhere
WRONG_CODE_TOGETHER_REFILL_S = 0.1
ADDRESSES_REMEMBERED = 4096
