"""Kafka's error codes that the project knows by name, taken from kio's enum: the one place to import them from.

Plain integers, as they come from the wire: comparing members of the enum takes half as long again, looking one up ten
times as long. An answer without an error has 0. :func:`isthmus_protocol.bodies.error_code` makes a member of a number.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

UNKNOWN_SERVER_ERROR: Final[int] = int(ErrorCode.unknown_server_error)
OFFSET_OUT_OF_RANGE: Final[int] = int(ErrorCode.offset_out_of_range)
UNKNOWN_TOPIC_OR_PARTITION: Final[int] = int(ErrorCode.unknown_topic_or_partition)
LEADER_NOT_AVAILABLE: Final[int] = int(ErrorCode.leader_not_available)
NOT_LEADER_OR_FOLLOWER: Final[int] = int(ErrorCode.not_leader_or_follower)
REQUEST_TIMED_OUT: Final[int] = int(ErrorCode.request_timed_out)
BROKER_NOT_AVAILABLE: Final[int] = int(ErrorCode.broker_not_available)
REPLICA_NOT_AVAILABLE: Final[int] = int(ErrorCode.replica_not_available)
MESSAGE_TOO_LARGE: Final[int] = int(ErrorCode.message_too_large)
NETWORK_EXCEPTION: Final[int] = int(ErrorCode.network_exception)
COORDINATOR_LOAD_IN_PROGRESS: Final[int] = int(ErrorCode.coordinator_load_in_progress)
COORDINATOR_NOT_AVAILABLE: Final[int] = int(ErrorCode.coordinator_not_available)
NOT_COORDINATOR: Final[int] = int(ErrorCode.not_coordinator)
NOT_ENOUGH_REPLICAS: Final[int] = int(ErrorCode.not_enough_replicas)
NOT_ENOUGH_REPLICAS_AFTER_APPEND: Final[int] = int(ErrorCode.not_enough_replicas_after_append)
ILLEGAL_GENERATION: Final[int] = int(ErrorCode.illegal_generation)
UNKNOWN_MEMBER_ID: Final[int] = int(ErrorCode.unknown_member_id)
TOPIC_AUTHORIZATION_FAILED: Final[int] = int(ErrorCode.topic_authorization_failed)
GROUP_AUTHORIZATION_FAILED: Final[int] = int(ErrorCode.group_authorization_failed)
CLUSTER_AUTHORIZATION_FAILED: Final[int] = int(ErrorCode.cluster_authorization_failed)
UNSUPPORTED_VERSION: Final[int] = int(ErrorCode.unsupported_version)
TOPIC_ALREADY_EXISTS: Final[int] = int(ErrorCode.topic_already_exists)
INVALID_REPLICATION_FACTOR: Final[int] = int(ErrorCode.invalid_replication_factor)
INVALID_REQUEST: Final[int] = int(ErrorCode.invalid_request)
INVALID_CONFIG: Final[int] = int(ErrorCode.invalid_config)
RECORD_LIST_TOO_LARGE: Final[int] = int(ErrorCode.record_list_too_large)
POLICY_VIOLATION: Final[int] = int(ErrorCode.policy_violation)
OUT_OF_ORDER_SEQUENCE_NUMBER: Final[int] = int(ErrorCode.out_of_order_sequence_number)
DUPLICATE_SEQUENCE_NUMBER: Final[int] = int(ErrorCode.duplicate_sequence_number)
INVALID_TXN_STATE: Final[int] = int(ErrorCode.invalid_txn_state)
INVALID_PRODUCER_ID_MAPPING: Final[int] = int(ErrorCode.invalid_producer_id_mapping)
CONCURRENT_TRANSACTIONS: Final[int] = int(ErrorCode.concurrent_transactions)
TRANSACTION_COORDINATOR_FENCED: Final[int] = int(ErrorCode.transaction_coordinator_fenced)
SECURITY_DISABLED: Final[int] = int(ErrorCode.security_disabled)
OPERATION_NOT_ATTEMPTED: Final[int] = int(ErrorCode.operation_not_attempted)
KAFKA_STORAGE_ERROR: Final[int] = int(ErrorCode.kafka_storage_error)
UNKNOWN_PRODUCER_ID: Final[int] = int(ErrorCode.unknown_producer_id)
NON_EMPTY_GROUP: Final[int] = int(ErrorCode.non_empty_group)
GROUP_ID_NOT_FOUND: Final[int] = int(ErrorCode.group_id_not_found)
FETCH_SESSION_ID_NOT_FOUND: Final[int] = int(ErrorCode.fetch_session_id_not_found)
INVALID_FETCH_SESSION_EPOCH: Final[int] = int(ErrorCode.invalid_fetch_session_epoch)
FENCED_LEADER_EPOCH: Final[int] = int(ErrorCode.fenced_leader_epoch)
UNKNOWN_LEADER_EPOCH: Final[int] = int(ErrorCode.unknown_leader_epoch)
UNSUPPORTED_COMPRESSION_TYPE: Final[int] = int(ErrorCode.unsupported_compression_type)
OFFSET_NOT_AVAILABLE: Final[int] = int(ErrorCode.offset_not_available)
GROUP_SUBSCRIBED_TO_TOPIC: Final[int] = int(ErrorCode.group_subscribed_to_topic)
INVALID_RECORD: Final[int] = int(ErrorCode.invalid_record)
THROTTLING_QUOTA_EXCEEDED: Final[int] = int(ErrorCode.throttling_quota_exceeded)
UNKNOWN_TOPIC_ID: Final[int] = int(ErrorCode.unknown_topic_id)
INCONSISTENT_TOPIC_ID: Final[int] = int(ErrorCode.inconsistent_topic_id)
FETCH_SESSION_TOPIC_ID_ERROR: Final[int] = int(ErrorCode.fetch_session_topic_id_error)
STALE_MEMBER_EPOCH: Final[int] = int(ErrorCode.stale_member_epoch)
