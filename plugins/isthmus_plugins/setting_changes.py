"""Changes of a topic's settings, as far as its brokers take them: one that they refuse keeps no other from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, TypeVar

from isthmus_plugins.cluster import ClusterApi, KafkaRefused, NewTopic
from isthmus_protocol.error_codes import INVALID_CONFIG, POLICY_VIOLATION, TOPIC_AUTHORIZATION_FAILED

V = TypeVar("V", bound=str | None)
OF_SETTINGS: Final = frozenset({INVALID_CONFIG, POLICY_VIOLATION})
"""What brokers answer of a topic of which a setting, or a policy that looks at settings, is in the way."""


async def change(
    cluster: ClusterApi, topic: str, changes: Mapping[str, str | None], validate_only: bool = False
) -> dict[str, KafkaRefused]:
    """Change settings of a topic (None: back to the default), or (``validate_only``) ask whether that could be done.

    By setting that the brokers refuse: what they say. Raises BrokerUnavailable.
    """
    if not changes:
        return {}
    try:
        await cluster.alter_topic_configs(topic, changes, validate_only)
        return {}
    except KafkaRefused as error:
        if len(changes) == 1 or error.error_code == TOPIC_AUTHORIZATION_FAILED:
            return dict.fromkeys(changes, error)

    async def alter(settings: Mapping[str, str | None]) -> KafkaRefused | None:
        try:
            await cluster.alter_topic_configs(topic, settings, validate_only)
        except KafkaRefused as error:
            return error
        return None

    return (await _one_by_one(alter, {}, changes))[1]


async def creatable(
    cluster: ClusterApi, topic: NewTopic, needed: Collection[str]
) -> tuple[Mapping[str, str], Mapping[str, KafkaRefused]]:
    """The settings that a new topic can be created with, and by setting what the brokers say of the others.

    ``needed``: the names of those without which it is not created. Raises KafkaRefused: it is not, whatever it has of
    the others. Raises BrokerUnavailable.
    """

    async def create(settings: Mapping[str, str]) -> KafkaRefused | None:
        return (await cluster.try_topics([topic._replace(configs=settings)])).get(topic.name)

    refused = await create(topic.configs)
    if refused is None:
        return topic.configs, {}
    kept = {name: value for name, value in topic.configs.items() if name in needed}
    if refused.error_code not in OF_SETTINGS or await create(kept) is not None:
        raise refused
    others = {name: value for name, value in topic.configs.items() if name not in needed}
    return await _one_by_one(create, kept, others)


async def _one_by_one(
    ask: Callable[[Mapping[str, V]], Awaitable[KafkaRefused | None]], taken: Mapping[str, V], left: Mapping[str, V]
) -> tuple[dict[str, V], dict[str, KafkaRefused]]:
    """Add what is ``left`` to what is ``taken`` where the brokers take that, too; what they took, and why not all.

    Each is asked beside what is taken: some settings are valid only together with others.
    """
    found, refused = dict(taken), dict[str, KafkaRefused]()
    while left:
        refused = {}
        for name, value in left.items():
            if (error := await ask({**found, name: value})) is None:
                found[name] = value
            else:
                refused[name] = error
        if len(refused) == len(left):
            break
        left = {name: left[name] for name in refused}
    return found, refused
