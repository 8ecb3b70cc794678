"""What the brokers would refuse of the settings of topics that are about to follow: asked, and nothing changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from isthmus_control.model import CONTROL_TOPIC
from isthmus_plugins import setting_changes
from isthmus_plugins.cluster import KafkaRefused, NewTopic
from isthmus_plugins.links import TopicPlan
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.logs import topic_settings

TRIED_AT_ONCE: Final = 100
"""Topics in one request."""


async def note_refused(
    context: PluginContext, plans: Collection[TopicPlan], sources: Mapping[str, calls.LedTopic], taken: Collection[str]
) -> None:
    """Add to plans what the brokers would refuse of the settings of their topics.

    ``sources``: by local topic, of those whose source said its settings. ``taken``: the names of topics that there are.
    Raises BrokerUnavailable, KafkaRefused.
    """
    cluster = context.cluster
    defaults = await cluster.topic_configs(CONTROL_TOPIC)
    brokers = len(await cluster.broker_racks())
    created: dict[str, tuple[TopicPlan, NewTopic]] = {}
    for plan in plans:
        source = sources.get(plan.topic)
        if source is None or source.configs is None or plan.action == "refuse":
            continue
        factor = min(source.replication_factor or 1, brokers)
        chosen = topic_settings.wanted(source.configs, defaults, factor)
        if plan.action == "follow":
            changes = topic_settings.changes(await cluster.topic_configs(plan.topic), chosen)
            _note(plan, await setting_changes.change(cluster, plan.topic, changes, validate_only=True))
        else:
            name = plan.topic
            while name in taken:  # one that is lost for it is there still
                name += "-"
            created[name] = plan, NewTopic(name, source.partitions, factor, chosen)
    names = list(created)
    for start in range(0, len(names), TRIED_AT_ONCE):
        refused = await cluster.try_topics([created[name][1] for name in names[start : start + TRIED_AT_ONCE]])
        for name in refused:
            plan, topic = created[name]
            try:
                _note(plan, (await setting_changes.creatable(cluster, topic, topic_settings.OVERRIDES))[1])
            except KafkaRefused as error:
                plan.reason = f"the target refuses the topic: {error}"


def _note(plan: TopicPlan, refused: Mapping[str, KafkaRefused]) -> None:
    if refused:
        plan.settings_refused = reasons.settings_refused(plan.topic, refused).message
