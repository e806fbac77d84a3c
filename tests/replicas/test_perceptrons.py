"""Which models are plain perceptrons; what is cached may be lost at any time."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from toys import D, N, make_data, mlp, replica

from diminuendo.replicas import train
from diminuendo.replicas.batch import cross_entropy
from diminuendo.replicas.layers import layers_of
from diminuendo.replicas.perceptrons import Perceptrons


def test_a_perceptron_with_hooks_goes_through_them() -> None:
    def hooked() -> nn.Module:
        model = mlp()
        model[0].register_forward_hook(lambda *given: 2 * given[-1])
        return model

    def prepared() -> nn.Module:
        model = mlp()
        model.register_forward_pre_hook(lambda _, given: (2 * given[0],))
        return model

    assert layers_of(mlp()) is not None
    data = make_data()
    (bare,) = train(mlp, data, [replica()], progress=False)
    for model in (hooked, prepared):
        assert layers_of(model()) is None
        (outcome,) = train(model, data, [replica()], progress=False)
        assert outcome.train_loss != pytest.approx(bare.train_loss, rel=1e-6)


class Forgetful(dict[Any, Any]):
    """As if another thread had emptied it at once."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.clear()


def test_what_is_kept_may_be_thrown_away_by_another_thread() -> None:
    x, y = make_data()
    batch = Perceptrons(layers_of(mlp()) or [], 2, cross_entropy, (2, N), x.new_empty(0))
    points = batch.data(x.unsqueeze(0), y.unsqueeze(0), [0, 0])
    batch._map_cache, points._cache = Forgetful(), Forgetful()
    rows = slice(0, 2)
    assert len(batch._views(rows)[0]) == 2
    assert points.some(rows, slice(0, N)).x.shape == (2, N, D + 1)
