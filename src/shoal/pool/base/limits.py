"""Every deadline and limit of the pool and its clients: one table for each kind of process.

A name ends with its unit: `_S` seconds, `_BYTES`, `_CHARS`, `_DAYS`, or `_MAX` for a count.
"""

from __future__ import annotations

from shoal import _constants

PORT = 7433  # of a head that listens

# --- every process: messages and connections -------------------------------------------------------

FRAME_BYTES_MAX = 256 * 1024
READ_BYTES = 64 * 1024  # of one read from a connection
OUTGOING_BYTES_MAX = 4 * 2**20  # waiting for a peer that does not read; above, it is cut off
NAME_CHARS_MAX = 64
TEXT_CHARS_MAX = 2000
DIMENSIONS_MAX = 64  # of a tensor: torch's own limit
SESSIONS_MAX = _constants.SESSIONS_MAX
DEVICES_PER_NODE_MAX = 64
DEVICES_PER_LEASE_MAX = _constants.DEVICES_PER_LEASE_MAX
IDENTITY_BYTES_MAX = 64 * 1024
REPORT_BYTES_MAX = 4096  # of a start report: what a pipe takes in one write

CONNECT_S = 4.0  # to reach a server, TLS handshake included; of a head, its first answer included
FIRST_ANSWER_S_MIN = 0.9  # for that answer, however long the rest took
HANDSHAKE_S = 5.0  # from accept to a finished TLS handshake
FIRST_FRAME_S = 5.0  # from there to the first whole request
FRAME_S = 5.0  # from a frame's first byte to its last
CLOSE_S = 1.0  # to flush a connection before it closes
ACCEPT_RETRY_S = 0.05  # pause after accept() failed: no descriptors are left
BEAT_S = 1.0
SILENCE_S = 4.0  # without a beat; then the node, or the head, is lost
GPU_LOOK_S = 2.0  # an agent asks the driver for its GPUs' load
RETRY_S = 0.25  # between attempts to connect or to bind
RESUME_S = 10.0  # a client that lost its head returns within this, or its lease ends
RETURNS_PER_S = 50  # handshakes that a head surely makes: after a restart it waits so much longer

# --- head ------------------------------------------------------------------------------------------

ANONYMOUS_FRAME_BYTES_MAX = 8 * 1024  # a join request is under 2 KiB
CONNECTIONS_MAX = 8192  # nodes and members together
STRANGERS_MAX = 64  # pending connections: they have not authenticated
STRANGERS_PER_ADDRESS_MAX = 16
STRANGERS_AT_START_MAX = 512  # for the first RESUME_S: clients of an earlier head come back at once
IDLE_S = 120.0  # a silent client without a lease
LEASE_SILENCE_S = 30.0  # a silent remote client with a lease; then it counts as gone
GRANT_S = 3.0  # from a grant to the device server's confirmation
RECOVERY_S = 4.0  # a request waits this long for a device server that restarts
USES_SAVE_S = 60.0  # between writes of what owners have used
WAIT_REPORT_S = 5.0  # between looks at what a waiting client is shown
WAIT_ESTIMATED_MAX = 16  # the first in line are shown an estimate unasked; it costs more
WAIT_BEAT_S = 5.0  # of a client that waits
WAIT_S_MAX = 30 * 86400.0
WAITING_MAX = 20_000  # leases that wait at a head
START_WAIT_S = 55.0  # a request waits this long for an embedded pool's devices to start
END_CORRECT_S = 5.0  # the reason of an end may be corrected this long
END_KEEP_S = 600.0  # a client that was away can ask this long why its lease ended
ENDS_KEPT_MAX = 4096
LOST_NODES_MAX = 64  # remembered, for people who ask after them
SESSIONS_SHOWN_MAX = 2000
STATUS_ROWS_PER_PAGE = 1000  # of each of its lists; below half a MiB with ordinary names
STATUS_VERSIONS_KEPT = 4  # for those who read page after page
CLIENTS_SHOWN_MAX = 500
PROFILES_PER_PAGE = 200  # of an answer; a profile is at most some KiB
REASONS_SHOWN_MAX = 8  # in the text of a refusal
AUDIT_ENTRIES_MAX = 100_000
UNWRITTEN_NOTES_MAX = 10_000  # of the audit log; the rest of the state is bounded by what exists
METRICS_REQUEST_BYTES_MAX = 8 * 1024
STORE_BUSY_S = 5.0  # while another process reads the state
STORE_FLUSH_S = 20.0  # for a commit; then the disk counts as stuck

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

SESSION_BEAT_S = 1.0  # a device server looks at its sessions, if none of them rings before
SESSION_LOOK_S = 0.002  # and at most this often if they do
SESSION_PROFILE_S = 2.0  # between two profiles of a session that only goes on
PROFILE_COUNT_MAX = 2**62  # a worker's counters are cut off here
MEMORY_HEADROOM_BYTES = 32 * 2**20  # of a session's part, beyond what it uses
ORDER_FDS_MAX = 7  # connection, last words, block, two events, host region, data connections
PROFILED_OPERATORS_MAX = 64  # of a profile: those that took most time
MEMORY_WAIT_S = 30.0  # a call waits for memory that others use, if they too wait in a call

UNKNOWN_WORK_S = 600.0  # assumed of a task of which nothing is known, on the fastest device
PLAN_S = 2.0  # for the planner to answer; then the last plan stands
PLAN_HANG_S = 30.0  # without an answer, or a start: then it is killed and started again
PLAN_BYTES_MAX = 64 * 2**20  # of a question or answer
ROUNDS_RECORDED_MAX = 1000
LEARNED_TYPES_MAX = 200  # of tasks, the newest, that are kept over a restart of the head
LEARNED_NAMES_MAX = 2000  # of tasks, likewise
LEARNED_BYTES_MAX = 4 * 2**20  # of all that is kept
LEARNED_SAVE_S = 10.0  # between two times that what the planner learned is written
ROUND_S = 60.0  # between two plans, if nothing happens
ROUND_PAUSE_S = 0.05  # between two plans at least; and as long as the last one took
ROUND_FULL_S = 2.0  # between two plans while no device is free
PLAN_STANDS_S = 150.0  # without a new plan, the rule admits what was left to the planner
PLANNED_TASKS_MAX = 128  # waiting tasks of one plan: the first in line
UNUSED_S = 10.0  # a program that has no lease after this long leaves its devices to others, too
WATCH_LOOK_S = 1.0  # between two looks at the running tasks
ALONE_S = 5.0  # a task that has its device alone is measured for so long
WATCH_S = 30.0  # tasks that share a device are watched for so long before their speed counts
SUSPEND_S = 10.0  # for a session to be suspended; then it goes on

FORK_S = 10.0  # the fork server's answer; it forks a process with all of torch's libraries
PROBE_DEVICE_S = 60.0  # a driver's first start on a cold machine
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

# --- tasks and runners -----------------------------------------------------------------------------

TASKS_PER_PAGE = 200
TASKS_PER_SUBMISSION_MAX = 200  # of one message; an array takes several
UNFINISHED_TASKS_MAX = 100_000
TASKS_KEPT_MAX = 10_000  # that have ended
TASKS_KEPT_DAYS = 30
TASKS_REMOVE_S = 600.0  # between two looks for ended tasks that are too old
ATTEMPTS_PER_RUNNER_MAX = 500
ATTEMPT_START_S = 60.0  # from the plan to the program's start
RUNNER_WAIT_S = 10.0  # a task whose runner is away waits this long for one on this machine
RUNNER_SILENCE_S = 330.0  # and this long for one on another; it ends its tasks before
RUNNER_ALONE_S = 300.0  # a runner elsewhere ends its tasks when the head was silent this long
RUNNER_RETRY_S = 0.25  # between attempts to reach the head
RUNNER_GONE_GRACE_S = 1.0  # for a task's processes when their runner has ended
LEFT_BEHIND_S = 10.0  # a new runner waits this long for what an earlier one has left
KILL_POLL_S = 0.02  # while killed processes end
LOG_FILE_BYTES = 64 * 2**20  # of a task's log; two of them are kept
LOG_READ_BYTES_MAX = 128 * 1024  # of one answer
LOG_POLL_S = 0.2  # of `shoal logs -f`
TASK_WAIT_S = 20.0  # of one request that waits for a task's end
PIPE_READ_BYTES = 64 * 1024
SNAPSHOT_BYTES_MAX = 200 * 2**20
SNAPSHOT_FILES_MAX = 20_000
FETCH_FILES_MAX = 1000  # of one page
FILE_CHUNK_BYTES = 128 * 1024  # of a submitted file, in a message
FILES_PER_MESSAGE_MAX = 1000
FILES_OF_OWNER_BYTES = 2 * 2**30  # at the head, for programs that run on other machines
FILE_LIST_BYTES_MAX = 8 * 2**20  # of a snapshot's list
FILES_ASKED_MAX = 8  # requests of a runner that wait for the head

SANDBOX_TRY_S = 20.0  # to start a program in it
SANDBOX_LOOK_S = 0.5  # between looks at what it uses
SANDBOX_FOLDER_BYTES = 10 * 2**30  # of its work and temporary folders together
SANDBOX_FILES_MAX = 200_000
SANDBOX_DEPTH_MAX = 200  # of its folders
SANDBOX_PROCESSES_MAX = 512
SANDBOX_DESCRIPTORS = 4096
SANDBOX_SHARED_BYTES = 1 * 2**30  # of its /dev/shm
SANDBOX_MEMORY_FRACTION = 0.5  # of the machine's
DOOR_CONNECTIONS_MAX = 128
DOOR_LINE_BYTES_MAX = 512
DOOR_BUFFER_BYTES = 256 * 1024
TASK_CERTIFICATE_DAYS = 30  # of an attempt; the head refuses it once the attempt has ended
POSITIONS_S = 1.0  # a long line's positions are counted this often
SUBMIT_LOOK_S = 0.2  # a submission after so long a pause is looked at before its answer
SCHEDULE_PAUSE_S = 0.02  # between two looks at the waiting tasks

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

# --- people ----------------------------------------------------------------------------------------
EVENTS_MAX = 1000  # that the head keeps; the oldest one that is over makes room
EVENT_TICK_S = 0.5  # between looks at the conditions of open events
EVENT_CODE_SLOT_S = 30  # the code on an event's screen changes as often
PEOPLE_ROWS_MAX = 200  # of a page
AUDIT_ACTOR_CHARS_MAX = 64
AUDIT_DETAIL_CHARS_MAX = 500
HISTORY_SAMPLE_S = 5.0
HISTORY_SAMPLES_MAX = 720  # of a device: an hour
HISTORY_SPANS_MAX = 2000  # sessions that have ended
HISTORY_DEVICES_MAX = 1024  # more have no samples
HISTORY_SHOWN_MAX = 24  # devices in one answer about all of them
HISTORY_SHOWN_SAMPLES = 60  # of each of these
TICKET_S = 60.0  # a sign-in link is good once, for this long
TICKETS_MAX = 1000
CLAIM_S = 300.0  # a browser shows its six digits for this long
CLAIMS_MAX = 20
BROWSER_SESSION_S = 12 * 3600.0
GUEST_SESSION_S = 7 * 86400.0
GUEST_CODE_S = 7 * 86400.0  # a guest's join code
TOKENS_PER_OWNER_MAX = 100
WEB_WATCH_S = 20.0  # the head answers the web process by then, whether anything has changed or not
WEB_TOPICS_MAX = 1000  # changes that the head remembers
POOL_CHANGE_WAIT_S = 5.0

# --- engines ---------------------------------------------------------------------------------------
ENGINE_LOOK_S = 0.5  # between looks at an engine's nodes, and at a pool's parts
ENGINE_CALL_S = 10.0  # of a call to an actor
ENGINE_PARTS_S = 2.0  # an actor says by then how its process is
ENGINE_START_S = 120.0  # until head and first agent are ready
ENGINE_STOP_S = 60.0
ENGINE_PROBE_S = 20.0  # to find out whether the engine wants a token; its libraries load meanwhile
