"""What this version knows beyond its version of the link protocol, and what a link needs its peer to know.

Both ends say what they know in the handshake. Nothing is asked of a peer that does not know it. What a link cannot do
without it needs: an end takes no connection with a proxy that does not know that, one that was downgraded, say, and the
link is Out-Of-Sync, or Disconnected, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from isthmus_control.model import Link, LinkMode

SYNC_LEASE: Final = "sync-lease"
DECISIONS: Final = "decisions"
CONFIRMED_COMMITS: Final = "confirmed-commits"
CONTROL_ANCHORS: Final = "control-anchors"
SOURCE_LOSSES: Final = "source-losses"
"""It does what is set for what a source lost, and tells it."""
PARTITION_ENDS: Final = "partition-ends"
"""It says where its logs end, for committed offsets that may be beyond."""
NEGATIVE_OFFSETS: Final = "negative-offsets"
"""Groups may have committed such."""
DECISIONS_IN_PART: Final = "decisions-in-part"
"""It takes an answer to decisions that says of which topics they are not stored. Others are refused all of them."""
LEFT_OUT_NAMES: Final = "left-out"
"""It says what links leave out although a namespace's prefix covers it."""
SOURCE_DELETIONS: Final = "source-deletions"
"""It says which of its topics were deleted for certain, and does what is set for those of its source."""
PIECES: Final = "pieces"
"""It takes large frames in pieces that come between others (:mod:`isthmus_protocol.link_pieces`)."""
ENCRYPTED_FRAMES: Final = "encrypted-frames"
"""It encrypts frames where it has no TLS (:mod:`isthmus_protocol.link_cipher`)."""
ROTATED_SECRETS: Final = "rotated-secrets"
"""It can have two secrets of a link, and dialler and acceptor say which one they mean."""
TOKENS: Final = "tokens"
"""It takes links from who shows a token of its cluster's."""
CONSENTS: Final = "consents"
"""It says what it has not granted, and shows what waits for its operator."""
ORIGINS: Final = "origins"
"""It records where the records of its source come from, as that says it (:mod:`isthmus_control.origins`)."""
SHARED_PREFIX: Final = "shared-prefix"
"""It says of a topic where its records come from before that is followed, for the follower to go on where they part."""
COUNTERPARTS: Final = "counterparts"
"""It detaches its end of a pair by the other end's prefix, where that end was detached before."""
REVERSALS: Final = "reversals"
"""It leads what is handed over to it, and says whether it has handed something over."""
BACKGROUND_DIGESTS: Final = "background-digests"
"""It reads no more for a digest than it is asked for, and says which batch it cannot read."""
CLIENT_MOVES: Final = "client-moves"
"""It tells its clients to look for the other cluster, where that leads what it led."""
RINGS: Final = "rings"
"""It says whether what it leads comes from a cluster, over whatever links."""
UNCONFIRMED: Final = "unconfirmed"
"""It says what its follower has not confirmed, which a failover would lose."""
SYNC_FEATURES: Final = frozenset({SYNC_LEASE, DECISIONS, CONFIRMED_COMMITS})
"""What synchronous links need of a peer."""
FEATURES: Final = (
    SYNC_LEASE,
    DECISIONS,
    CONFIRMED_COMMITS,
    CONTROL_ANCHORS,
    SOURCE_LOSSES,
    PARTITION_ENDS,
    NEGATIVE_OFFSETS,
    DECISIONS_IN_PART,
    LEFT_OUT_NAMES,
    SOURCE_DELETIONS,
    PIECES,
    ENCRYPTED_FRAMES,
    ROTATED_SECRETS,
    TOKENS,
    CONSENTS,
    ORIGINS,
    SHARED_PREFIX,
    COUNTERPARTS,
    REVERSALS,
    BACKGROUND_DIGESTS,
    CLIENT_MOVES,
    RINGS,
    UNCONFIRMED,
)


def known_by(peer: Mapping[str, Any]) -> frozenset[str]:
    """What a peer knows of :data:`FEATURES`, and of those to come, by what it said; nothing if it is older."""
    features = peer.get("features")
    return frozenset(map(str, features)) if isinstance(features, list) else frozenset()


class Protection(StrEnum):
    """What keeps others from reading and altering what goes over a connection. The better ones come first."""

    TLS = "tls"
    FRAMES = "frames"
    NONE = "none"


def in_the_clear(peer: object, refused: bool = False) -> str:
    """What is told of a connection that nothing protects."""
    why = f"the other cluster's proxy {peer} does not know {ENCRYPTED_FRAMES}"
    so = "which [link] require_encryption needs here" if refused else "so nothing that the link sends is encrypted"
    return f"{why}, {so}: upgrade it, or give both clusters' link listeners TLS"


def missing(link: Link, peer: Mapping[str, Any]) -> str | None:
    """What the link needs and the peer does not know, in words; None: it knows all."""
    needed = SYNC_FEATURES if link.mode is LinkMode.SYNCHRONOUS else frozenset()
    unknown = sorted(needed - known_by(peer))
    if not unknown:
        return None
    return (
        f"the other cluster's proxy {peer.get('proxy')} does not know {', '.join(unknown)}, which a synchronous link "
        f"needs: upgrade it"
    )
