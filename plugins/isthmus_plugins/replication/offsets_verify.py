"""Verification of copies of offsets topics that are redacted or encrypted: their ends, and how many records they have.

Record by record they cannot be compared: what is left out shall not be known to the other side, and what is encrypted
is not equal. So each side counts the latest records of its keys: the source of those groups that leave it, the target of
all that the copy has. A copy that was made in several forms or with several keys may have more, and never fewer.
"""

from __future__ import annotations

from collections.abc import Callable

from isthmus_control.model import NamespaceMapping, OffsetsForm, Role
from isthmus_plugins.api import PluginContext, TopicInfo
from isthmus_plugins.replication.offsets_keyring import KeyringFile
from isthmus_plugins.replication.verify_reading import batches
from isthmus_protocol.group_names import GroupPatterns
from isthmus_protocol.offsets_log import UnknownRecord, decode_key
from isthmus_protocol.producer_ids import is_filler
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.wire import MalformedFrame
