"""The access to its cluster is all that plugins are promised: nobody checks its structure where it is passed on."""

from __future__ import annotations

import inspect

import pytest

from isthmus.cluster_access import ClusterAccess, FetchOverConnection, ProduceOverConnection
from isthmus_plugins.api import ClusterApi, FetchConnection, ProduceConnection


@pytest.mark.parametrize(
    ("own", "promised"),
    [(ClusterAccess, ClusterApi), (ProduceOverConnection, ProduceConnection), (FetchOverConnection, FetchConnection)],
)
def test_nothing_is_missing(own: type, promised: type) -> None:
    names = [name for name, _ in inspect.getmembers(promised, inspect.isfunction) if not name.startswith("_")]
    assert names
    for name in names:
        wanted, found = (inspect.signature(getattr(each, name)).parameters for each in (promised, own))
        assert list(found) == list(wanted), name
