"""Every deadline and limit of the pool and its clients: one table for each kind of process.

A name ends with its unit: `_S` seconds, `_BYTES`, `_CHARS`, `_DAYS`, or `_MAX` for a count.
"""

from __future__ import annotations

PORT = 7433  # of a head that listens

# --- every process: messages and connections -------------------------------------------------------

FRAME_BYTES_MAX = 256 * 1024
READ_BYTES = 64 * 1024  # of one read from a connection
OUTGOING_BYTES_MAX = 4 * 2**20  # waiting for a peer that does not read; above, it is cut off
NAME_CHARS_MAX = 64
TEXT_CHARS_MAX = 2000
DIMENSIONS_MAX = 64  # of a tensor: torch's own limit
SESSIONS_MAX = 2047  # a session number is eleven bits of an address, and 0 is none
DEVICES_PER_NODE_MAX = 64
DEVICES_PER_LEASE_MAX = 32  # members of the core's address space
IDENTITY_BYTES_MAX = 64 * 1024
REPORT_BYTES_MAX = 4096  # of a start report: what a pipe takes in one write

CONNECT_S = 4.0  # to reach a server, TLS handshake included
HANDSHAKE_S = 5.0  # from accept to a finished TLS handshake
FIRST_FRAME_S = 5.0  # from there to the first whole request
FRAME_S = 5.0  # from a frame's first byte to its last
CLOSE_S = 1.0  # to flush a connection before it closes
ACCEPT_RETRY_S = 0.05  # pause after accept() failed: no descriptors are left
BEAT_S = 1.0
SILENCE_S = 4.0  # without a beat; then the node, or the head, is lost
RETRY_S = 0.25  # between attempts to connect or to bind
RESUME_S = 10.0  # a client that lost its head returns within this, or its lease ends

# --- head ------------------------------------------------------------------------------------------

ANONYMOUS_FRAME_BYTES_MAX = 8 * 1024  # a join request is under 2 KiB
CONNECTIONS_MAX = 1024
STRANGERS_MAX = 64  # pending connections: they have not authenticated
STRANGERS_PER_ADDRESS_MAX = 16
IDLE_S = 120.0  # a silent client without a lease
LEASE_SILENCE_S = 30.0  # a silent remote client with a lease; then it counts as gone
GRANT_S = 3.0  # from a grant to the device server's confirmation
RECOVERY_S = 4.0  # a request waits this long for a device server that restarts
START_WAIT_S = 55.0  # a request waits this long for an embedded pool's devices to start
END_CORRECT_S = 5.0  # the reason of an end may be corrected this long
END_KEEP_S = 600.0  # a client that was away can ask this long why its lease ended
ENDS_KEPT_MAX = 4096
LOST_NODES_MAX = 64  # remembered, for people who ask after them
SESSIONS_SHOWN_MAX = 2000
CLIENTS_SHOWN_MAX = 500
PROFILES_PER_PAGE = 200  # of an answer; a profile is at most some KiB
REASONS_SHOWN_MAX = 8  # in the text of a refusal
AUDIT_ENTRIES_MAX = 100_000
UNWRITTEN_NOTES_MAX = 10_000  # of the audit log; the rest of the state is bounded by what exists
METRICS_REQUEST_BYTES_MAX = 8 * 1024
STORE_BUSY_S = 5.0  # while another process reads the state

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 365
RENEW_DAYS = 60  # the head renews its own certificate this long before it expires
CODE_TTL_S = 600.0
CODES_MAX = 1000  # unused and unexpired at once
WRONG_CODES_PER_ADDRESS = 10  # then one more every WRONG_CODE_REFILL_S
WRONG_CODE_REFILL_S = 6.0
WRONG_CODES_TOGETHER = 200  # from all addresses
WRONG_CODE_TOGETHER_REFILL_S = 0.1
ADDRESSES_REMEMBERED = 4096

# --- supervisor ------------------------------------------------------------------------------------

START_S = 90.0  # until a process is ready; the first import of torch from a cold disk is slow
STOP_S = 10.0
WORKED_S = 1.0  # a process that lived this long did not fail to start
RESTART_BACKOFF_S = 0.25  # doubles with each failure in a row
RESTART_BACKOFF_MAX_S = 5.0

# --- agent -----------------------------------------------------------------------------------------

HEAD_WELCOME_S = 60.0
REFUSED_S = 2.0  # between attempts of an agent that the head refuses
START_ATTEMPTS_MAX = 3  # of a device server that was never ready
SERVER_EXIT_S = 1.0  # from the end of a device server's connection to its exit
FIND_DEVICES_S = 60.0  # a child process imports torch
ENDED_PER_NODE_MAX = 100  # ends that wait for the head's return; with texts they fit a frame

SHARES_MAX = 4096  # of a node
SHARES_PER_LEASE_MAX = 1024
SHARE_PARTICIPANTS_MAX = 64  # programs that have a share open, its owner included
SHARES_LISTED_MAX = 200
SHARE_REQUESTS_MAX = 256  # connections, those that wait for an exclusive share included
DESCRIPTORS_MAX = 65536  # raised to this if the system allows it

PROFILE_QUIET_S = 1.0  # nothing may come or go for this long before a measurement
PROBE_S = 60.0  # most of it imports torch
PROBE_ATTEMPTS_MAX = 3  # then the agent logs the reason and waits for `shoal devices --refresh`
PROBE_MEMORY_BYTES = 512 * 2**20  # of each device
PROBE_LINE_BYTES_MAX = 64 * 1024
PROBE_FIGURE_S = 0.03  # for each figure; a device has eight
LINKED_DEVICES_MAX = 8  # links are measured between these, each way
PROFILE_FILE_BYTES_MAX = 4 * 2**20
PROFILES_CACHED_MAX = 256  # the oldest go first
LINKS_CACHED_MAX = 4096

# --- device server and data reader -----------------------------------------------------------------

HELLO_S = 2.0  # a local client has its Hello ready
PEERS_S = 30.0  # while the client opens the other devices of its lease, one by one
SERVER_SEND_S = 5.0  # for an answer to leave
GREETINGS_MAX = 64  # pending connections on the Unix socket, and as many on the TLS port
LAST_WORDS_BYTES_MAX = 1900
DYING_S = 2.0  # a killed worker exits within this, and frees its memory

READER_BYTES = 128 * 2**20  # of a reader's memory; only used pages cost
READ_SAMPLES_MAX = 2**14  # of one request: with the rest it fits a frame
READS_MAX = 256  # requests that wait at a reader
DATA_SOURCES_MAX = 64  # open at a reader
DATA_PATHS_MAX = 64  # of one source
DATA_PATH_CHARS_MAX = 2048
DATA_FOLDERS_MAX = 32  # that a node serves
DATA_LEAVES_MAX = 1024  # tensors of a sample, columns of a table
DATA_RUNS_MAX = 2**14

# --- client ----------------------------------------------------------------------------------------

ANSWER_BYTES_MAX = 2 * 2**20  # of a head: thousands of devices and sessions
ANSWER_S = 60.0  # of a head: the first import of torch from a cold disk is slow
WORKER_ANSWER_S = 30.0  # of a device server, which forks a worker first
RELEASE_S = 2.0  # for the head to hear that a lease is given back
ACQUIRE_S = 60.0  # of `shoal.acquire`
LOSS_REASON_S = 1.0  # a client waits this long for the head's reason of a loss
CUT_REASON_S = 0.8  # and this long where the network is silent: 4 s to notice, 5 s to report

# --- command line ----------------------------------------------------------------------------------

COMMAND_ANSWER_S = 10.0
DOCTOR_ANSWER_S = 5.0
CLOCK_S_MAX = 5.0  # certificates are backdated by an hour; a clock this wrong is a fault anyway
ROUND_TRIP_MS_SLOW = 5.0
CERTIFICATE_DAYS_LOW = 30
STATE_FREE_BYTES_LOW = 64 * 1024  # a few changes
REFRESH_POLL_S = 0.1
TOP_S_MIN = 0.1
