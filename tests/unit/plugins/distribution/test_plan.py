"""The plan of a tree as operators see it: distributors of each cluster, bits, masks, targets."""

from __future__ import annotations

import json

from support.trees import BALANCED, UNBALANCED

from isthmus_plugins.distribution.plan import as_json, as_text, plan


def test_the_balanced_picture() -> None:
    assert (
        as_text(BALANCED, plan(BALANCED, {("cluster-2", 3): "cluster-3"}))
        == """\
tree version 1: 4 clusters, header isthmus-copy-flags

level 3  mask 0111
├─ level 1  mask 0001
│  ├─ cluster-1
│  └─ cluster-2
└─ level 1  mask 0001
   ├─ cluster-3
   └─ cluster-4

CLUSTER    LEVEL  BIT   MASK  TARGET     OR
cluster-1  1      0001  0001  cluster-2
cluster-1  3      0100  0111  cluster-3  cluster-4
cluster-2  1      0001  0001  cluster-1
cluster-2  3      0100  0111  cluster-3  cluster-4
cluster-3  1      0001  0001  cluster-4
cluster-3  3      0100  0111  cluster-1  cluster-2
cluster-4  1      0001  0001  cluster-3
cluster-4  3      0100  0111  cluster-2  cluster-1
"""
    )


def test_the_unbalanced_picture() -> None:
    assert (
        as_text(UNBALANCED, plan(UNBALANCED, {}))
        == """\
tree version 1: 5 clusters, header isthmus-copy-flags

level 3  mask 0111
├─ level 2  mask 0011
│  ├─ cluster-1
│  └─ level 1  mask 0001
│     ├─ cluster-2
│     └─ cluster-3
└─ level 1  mask 0001
   ├─ cluster-4
   └─ cluster-5

CLUSTER    LEVEL  BIT   MASK  TARGET     OR
cluster-1  2      0010  0011  cluster-2  cluster-3
cluster-1  3      0100  0111  cluster-4  cluster-5
cluster-2  1      0001  0001  cluster-3
cluster-2  2      0010  0011  cluster-1
cluster-2  3      0100  0111  cluster-5  cluster-4
cluster-3  1      0001  0001  cluster-2
cluster-3  2      0010  0011  cluster-1
cluster-3  3      0100  0111  cluster-4  cluster-5
cluster-4  1      0001  0001  cluster-5
cluster-4  3      0100  0111  cluster-1  cluster-2 cluster-3
cluster-5  1      0001  0001  cluster-4
cluster-5  3      0100  0111  cluster-2  cluster-1 cluster-3
"""
    )


def test_the_plan_for_programs() -> None:
    found = as_json(BALANCED, plan(BALANCED, {}))
    assert json.loads(json.dumps(found)) == found
    assert (found["version"], found["header"]) == (1, "isthmus-copy-flags")
    assert [each["name"] for each in found["clusters"]] == list(BALANCED.leaves)
    assert found["clusters"][0]["distributors"] == [
        {"level": 1, "bit": 1, "mask": 1, "target": "cluster-2", "other_targets": []},
        {"level": 3, "bit": 4, "mask": 7, "target": "cluster-3", "other_targets": ["cluster-4"]},
    ]
