"""Files of tests of which CI runs one by subject, chosen by the tree; ``make test-stories`` runs them all.

Nearly all that CI costs are brokers, Java's tools and Spark, by file. What every commit must show is in no subject: the
user stories, a link that is exact, one that is synchronous, the failover, README and the demo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SUBJECTS: Final[Mapping[str, tuple[str, ...]]] = {
    "clients, and the limits that they meet": (
        "integration/test_clients_aiokafka.py",
        "integration/test_clients_at_follower.py",
        "integration/test_clients_java.py",
        "integration/test_clients_kafka_python.py",
        "integration/test_clients_librdkafka.py",
        "integration/test_clients_throttled.py",
        "integration/test_connect_at_follower.py",
        "integration/test_connection_burst.py",
        "integration/test_quotas.py",
        "integration/test_request_costs.py",
    ),
    "proxies in front of brokers, who may, the control log": (
        "integration/test_addresses_hidden.py",
        "integration/test_cluster_access.py",
        "integration/test_consents.py",
        "integration/test_control_log.py",
        "integration/test_control_signing.py",
        "integration/test_control_topic.py",
        "integration/test_embedded_cluster.py",
        "integration/test_kafka_client.py",
        "integration/test_link_security.py",
        "integration/test_namespace_plugins.py",
        "integration/test_partition_log.py",
        "integration/test_proxy_modes.py",
        "integration/test_proxy_security.py",
        "integration/test_sidecars_life.py",
        "integration/test_strangers.py",
    ),
    "records and settings that are odd, what was lost, what is cut": (
        "integration/test_background_verification.py",
        "integration/test_batch_limits.py",
        "integration/test_compacted_followers.py",
        "integration/test_disk_full.py",
        "integration/test_internal_topics.py",
        "integration/test_large_inside.py",
        "integration/test_left_out.py",
        "integration/test_link_faults.py",
        "integration/test_link_modes.py",
        "integration/test_missed_deletions.py",
        "integration/test_namespaces.py",
        "integration/test_newer_records.py",
        "integration/test_policies_and_tiers.py",
        "integration/test_power_loss.py",
        "integration/test_settings_of_versions.py",
        "integration/test_settings_refused.py",
        "integration/test_source_losses.py",
        "integration/test_source_losses_of_transactions.py",
        "integration/test_topic_settings.py",
        "integration/test_truncation.py",
        "integration/test_truncation_clients.py",
        "integration/test_truncation_faults.py",
    ),
    "synchronous links": (
        "integration/test_sync_groups.py",
        "integration/test_sync_isolation.py",
        "integration/test_sync_mode.py",
        "integration/test_sync_new_topics.py",
        "integration/test_sync_paused_leader.py",
        "integration/test_sync_several.py",
        "integration/test_sync_sidecars.py",
        "integration/test_sync_thin_line.py",
        "integration/test_sync_timeouts.py",
        "integration/test_sync_transactions.py",
    ),
    "transactions, offsets of groups, who wrote what": (
        "integration/test_group_offsets.py",
        "integration/test_moved_members.py",
        "integration/test_offsets_leaders.py",
        "integration/test_origins.py",
        "integration/test_own_transactions.py",
        "integration/test_replicas.py",
        "integration/test_time_offsets.py",
        "integration/test_transaction_log.py",
        "integration/test_transaction_verification.py",
        "integration/test_transactions_touching.py",
    ),
    "trees": (
        "integration/test_distribution.py",
        "integration/test_distribution_offsets.py",
    ),
    "capture and audit": (
        "integration/test_audit.py",
        "integration/test_capture.py",
        "integration/test_capture_links.py",
        "integration/test_hooks.py",
    ),
    "Spark": (
        "spark/test_anomalies.py",
        "spark/test_anomalies_query.py",
        "spark/test_audit.py",
        "spark/test_audit_clusters.py",
        "spark/test_captured_traffic.py",
        "spark/test_columns.py",
        "spark/test_compaction.py",
        "spark/test_generated.py",
        "spark/test_jobs.py",
        "spark/test_kafka_events.py",
        "spark/test_latency.py",
        "spark/test_links.py",
        "spark/test_pages.py",
        "spark/test_sync.py",
        "spark/test_sync_wan.py",
        "spark/test_tree.py",
    ),
}

SUITE: Final = "stories"
"""Where those of them run that CI leaves out, and the chosen ones as well."""
