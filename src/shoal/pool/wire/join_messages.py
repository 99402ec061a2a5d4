"""Messages of joining a pool: the only request to a head that needs no certificate."""

from __future__ import annotations

import msgspec
from msgspec.msgpack import Decoder

from shoal.pool.wire.message_fields import Name, Pem
from shoal.pool.wire.messages import FromClient, Refusal
from shoal.pool.wire.node_messages import NodeHello
from shoal.pool.wire.runner_messages import RunnerHello


class Join(msgspec.Struct, frozen=True, tag=True):
    """Stranger → head: a code's secret part, and a key to be certified."""

    code_id: Name
    secret: Name
    role: Name
    name: Name  # wished for; the head may add a number
    request: Pem  # PKCS #10


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Head → newcomer: welcome."""

    name: Name
    pool: Name
    certificate: Pem
    authority: Pem
    role: Name = ""  # that its code gives


FromHead = Joined | Refusal
FROM_HEAD: Decoder[FromHead] = Decoder(FromHead)

# The first message on a connection says which link it is.
FirstMessage = Join | NodeHello | RunnerHello | FromClient
FIRST: Decoder[FirstMessage] = Decoder(FirstMessage)
