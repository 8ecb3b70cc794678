"""What operators do with copies of offsets topics: choose their form, and read what a copy says of groups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from isthmus_control.commands import Body, SetOffsetsTopic
from isthmus_control.levels import CONSENT, ESCAPED_IDS
from isthmus_control.model import Link, OffsetsCopy, OffsetsForm, Role
from isthmus_control.outcome import Refuse
from isthmus_control.rules.offsets_topics import check_offsets_copy
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.links import OffsetsView, OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.topic_plans import Refusal
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.offsets_topic.keyring import KeyringFile
from isthmus_plugins.replication.offsets_topic.view import read_view
from isthmus_plugins.replication.operations.commands import Call
from isthmus_protocol.offsets_cipher import KeyringError
from isthmus_protocol.offsets_copy import needs_escape

OFF = "off"


def wanted_copy(form: str, groups: list[str]) -> OffsetsCopy | None:
    """What an operator asks for; None: no copy. Raises OperationError."""
    if form == OFF:
        if groups:
            raise OperationError("INVALID_REQUEST", "groups are chosen for a redacted copy only, not for none", 422)
        return None
    copy = OffsetsCopy(OffsetsForm(form), tuple(dict.fromkeys(groups)))
    try:
        check_offsets_copy(copy)
    except Refuse as error:
        raise OperationError("INVALID_REQUEST", str(error), 422) from error
    return copy


def choice(copy: OffsetsCopy | None) -> calls.CopyChoice | None:
    """What is sent to the other side."""
    return None if copy is None else calls.CopyChoice(copy.form, copy.groups)


def chosen_copy(said: calls.CopyChoice | None) -> OffsetsCopy | None:
    """What the other side said. Raises OperationError."""
    return None if said is None else wanted_copy(said.form.value, list(said.groups))


class OffsetsTopics:
    """``call`` asks the other cluster of a link, ``append`` records a command, ``would_append`` tries one.

    They raise OperationError.
    """

    def __init__(
        self,
        context: PluginContext,
        follower_end: FollowerEnd,
        follower_topics: FollowerTopics,
        keyring_file: KeyringFile,
        call: Call,
        append: Callable[[Body], Awaitable[None]],
        would_append: Callable[[Body], object],
    ) -> None:
        self._context = context
        self._follower_end = follower_end
        self._follower_topics = follower_topics
        self._keyring_file = keyring_file
        self._call = call
        self._append = append
        self._would_append = would_append

    async def choose(self, link_name: str, copy: OffsetsCopy | None) -> None:
        """Choose the form in which this cluster's offsets topic is copied over a link, at both ends.

        The follower's end is there first, and goes last: what is sent always has somewhere to go.
        """
        command = SetOffsetsTopic(link_name, Role.LEADER, copy)
        self._would_append(command)
        self.check(copy)
        there = calls.ChooseOffsetsTopic(choice(copy))
        if copy is None:
            await self._append(command)
            await self._call(link_name, there)
        else:
            await self._call(link_name, there)
            await self._append(command)

    async def on_choose(self, connection: LinkConnection, question: calls.ChooseOffsetsTopic) -> calls.Done:
        """The other side chose the form in which its offsets topic is copied to this one."""
        copy = chosen_copy(question.copy)
        link = self._context.control.state.links.get(connection.link_name)
        if link is not None:
            if copy is None:
                await self.end(link)
            else:
                self.check_name(link.remote_cluster_id)
                for_peer = self._context.control.state.level >= CONSENT
                await self._append(SetOffsetsTopic(link.name, Role.FOLLOWER, copy, for_peer))
        return calls.Done()

    async def end(self, link: Link) -> None:
        """Follow the other side's offsets topic no more. The copy stays."""
        mapping = link.offsets_topic(Role.FOLLOWER)
        if mapping is None:
            return
        async with self._follower_end.mapping_ended(link.name, mapping):
            await self._append(SetOffsetsTopic(link.name, Role.FOLLOWER, None))
        try:
            await self._follower_topics.detached(link.name, mapping)
        except (BrokerUnavailable, KafkaRefused, Refusal) as error:
            raise OperationError("BROKER_UNAVAILABLE", f"ended, but log ends not recorded: {error}", 503) from error

    async def view(self, link: Link, group: str | None) -> OffsetsView:
        """What the copy of the other side's offsets topic says, as far as this side has the keys."""
        mapping = link.offsets_topic(Role.FOLLOWER)
        if mapping is None or mapping.offsets is None:
            raise OperationError(
                "NOT_FOUND",
                f"link {link.name!r} brings no offsets topic here: choose it on cluster {link.remote_cluster_id} with "
                f"`isthmus link alter {link.name} --offsets-topic whole|redacted|encrypted`",
                404,
            )
        encrypted = mapping.offsets.form is OffsetsForm.ENCRYPTED
        try:
            keyring = self._keyring_file.keyring() if encrypted or self._keyring_file.configured else None
            return await read_view(self._context, link, mapping, keyring, group)
        except KeyringError as error:
            raise OperationError("KEYRING_UNUSABLE", str(error), 409) from error
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error

    def check(self, copy: OffsetsCopy | None) -> None:
        """Raises OperationError where this side's offsets topic cannot be copied, or it has no keys for that."""
        if copy is None:
            return
        self.check_name(self._context.cluster_id)
        if copy.form is not OffsetsForm.ENCRYPTED:
            return
        try:
            self._keyring_file.keyring()
        except KeyringError as error:
            raise OperationError("KEYRING_UNUSABLE", str(error), 409) from error

    def check_name(self, source_cluster_id: str) -> None:
        """Raises OperationError where the log cannot record a copy's name."""
        if needs_escape(source_cluster_id) and self._context.control.state.level < ESCAPED_IDS:
            raise OperationError(
                "CONFLICT",
                f"no topic can have cluster id {source_cluster_id!r} in its name, and to escape it needs feature level "
                f"{ESCAPED_IDS} of the control log of cluster {self._context.cluster_id!r}: isthmus control upgrade",
                409,
            )
