"""Producer ids of several clusters in one log: a range for each source cluster, so that they never collide.

Every cluster hands out producer ids from 0 upwards, so a copied batch would take the place of a local producer with the
same id in the target's producer state, and the local producer's batches would be acked as duplicates and not stored.
Replicated ids therefore live where no cluster ever hands one out, each source cluster in a range of its own:

    bit 63   0         ids are positive
    bit 62   1         replicated; a cluster would need 4.6e18 producers to get here by itself
    61..40   index     of the source cluster, registered (never hashed): 4,194,304 clusters
    39       0         bits 38..0 are the id that the source cluster handed out: 549,755,813,888 ids
             1         bits 38..0 name a link's own id: 2 x link number stamps plain batches, the odd one fills gaps

Rules: -1 (no producer) stays; an id that is in a range already stays there, however many links it crosses; an id that
comes back to the cluster that handed it out (A to B to A) is translated home again. A link's own ids stay even then:
no cluster handed them out.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_PRODUCER_ID = -1
REPLICATED = 1 << 62
INDEX_SHIFT = 40
CLUSTERS_MAX = 1 << (62 - INDEX_SHIFT)
IDS_PER_CLUSTER = 1 << (INDEX_SHIFT - 1)
LINKS_MAX = IDS_PER_CLUSTER >> 1

_OWN = IDS_PER_CLUSTER
_ID_MASK = IDS_PER_CLUSTER - 1


class ProducerIdOverflow(ValueError):
    """An id, cluster index or link number has no place in the scheme."""


@dataclass(frozen=True, slots=True)
class ProducerIdRange:
    """The producer ids reserved for one source cluster, by its registered index (0 to CLUSTERS_MAX - 1)."""

    index: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < CLUSTERS_MAX:
            raise ProducerIdOverflow(f"cluster index {self.index} is not in 0..{CLUSTERS_MAX - 1}")

    @property
    def start(self) -> int:
        """First id of the range."""
        return REPLICATED | self.index << INDEX_SHIFT

    @property
    def stop(self) -> int:
        """First id past the range."""
        return self.start + (1 << INDEX_SHIFT)

    def __contains__(self, producer_id: int) -> bool:
        return self.start <= producer_id < self.stop

    def stamp_id(self, link: int) -> int:
        """The id with which link number `link` stamps plain batches of this source cluster."""
        return self._own_id(link, 0)

    def filler_id(self, link: int) -> int:
        """The id, used by no producer, whose abort markers fill the gaps that link number `link` finds."""
        return self._own_id(link, 1)

    def _own_id(self, link: int, kind: int) -> int:
        if not 0 <= link < LINKS_MAX:
            raise ProducerIdOverflow(f"link number {link} is not in 0..{LINKS_MAX - 1}")
        return self.start | _OWN | link << 1 | kind


def is_replicated(producer_id: int) -> bool:
    """Whether the id is in some source cluster's range."""
    return producer_id >= REPLICATED


def is_links_own(producer_id: int) -> bool:
    """Whether the id is a link's stamp or filler, not a producer's."""
    return producer_id >= REPLICATED and bool(producer_id & _OWN)


def is_filler(producer_id: int) -> bool:
    """Whether the id is that of a link's fillers: its batches stand where the source has no records."""
    return is_links_own(producer_id) and bool(producer_id & 1)


def translate(producer_id: int, range_index: int) -> int:
    """The id under which batches of cluster `range_index` are stored elsewhere.

    Raises ProducerIdOverflow for an id or an index that the scheme has no place for.
    """
    if not 0 <= range_index < CLUSTERS_MAX:
        raise ProducerIdOverflow(f"cluster index {range_index} is not in 0..{CLUSTERS_MAX - 1}")
    if producer_id == NO_PRODUCER_ID or producer_id >= REPLICATED:
        return producer_id
    if not 0 <= producer_id < IDS_PER_CLUSTER:
        raise ProducerIdOverflow(f"producer id {producer_id} is not in 0..{IDS_PER_CLUSTER - 1}")
    return REPLICATED | range_index << INDEX_SHIFT | producer_id


def home(producer_id: int, own_index: int) -> int:
    """The id as cluster `own_index` knows it: its own ids as it handed them out, all others as they are."""
    if not 0 <= own_index < CLUSTERS_MAX:
        raise ProducerIdOverflow(f"cluster index {own_index} is not in 0..{CLUSTERS_MAX - 1}")
    if producer_id >> INDEX_SHIFT != REPLICATED >> INDEX_SHIFT | own_index or producer_id & _OWN:
        return producer_id
    return producer_id & _ID_MASK


def carry(producer_id: int, source_index: int, target_index: int) -> int:
    """The id with which a batch of cluster `source_index`'s log is stored in cluster `target_index`'s log."""
    return home(translate(producer_id, source_index), target_index)
