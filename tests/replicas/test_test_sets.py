"""A test set for each training set: every replica is assessed on its own."""

from __future__ import annotations

import pytest
import torch

from diminuendo.errors import InputError
from diminuendo.replicas import Replica, train
from diminuendo.tuning import Shape, TwoLayers, auxiliary

NETWORK = TwoLayers(4, 5, 2)
SETS = auxiliary.synthetic_sets(Shape(examples=30, features=4, classes=2), 3)
TESTS = auxiliary.synthetic_sets(Shape(examples=17, features=4, classes=2), 3, seed=1)


def replica(data: int) -> Replica:
    return Replica(sigmas=[3.0] * 4, lr=0.2, clip=1.0, seed=data + 5, data=data)


def test_each_replica_is_assessed_on_its_own_test_set() -> None:
    together = train(
        NETWORK,
        SETS,
        [replica(2), replica(0), replica(1)],
        evaluate={"own": TESTS, "shared": TESTS[0]},
        at_once=2,
        progress=False,
    )
    for outcome, k in zip(together, (2, 0, 1), strict=True):
        (alone,) = train(NETWORK, SETS, [replica(k)], evaluate={"own": TESTS[k]}, progress=False)
        assert outcome.evaluations["own"]["loss"] == pytest.approx(
            alone.evaluations["own"]["loss"], rel=1e-5
        )
        assert outcome.evaluations["own"]["accuracy"] == alone.evaluations["own"]["accuracy"]
    assert together[1].evaluations["own"] == together[1].evaluations["shared"]
    assert together[0].evaluations["own"] != together[0].evaluations["shared"]


def test_numbers_and_shapes_must_agree() -> None:
    with pytest.raises(InputError, match="one for each training set"):
        train(NETWORK, SETS, [replica(0)], evaluate={"own": TESTS[:2]}, progress=False)
    bad = [TESTS[0], TESTS[1], (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))]
    with pytest.raises(InputError, match="one shape"):
        train(NETWORK, SETS, [replica(0)], evaluate={"own": bad}, progress=False)
