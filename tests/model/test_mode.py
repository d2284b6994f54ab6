"""A model's mode: what a script flips between a forward and its backward is put back for the recomputation."""

from torch import nn

from mobius_ds.model.mode import Mode


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.enabled = True
        self.active = ["default"]
        self.scales = (1.0, 2.0)


def test_attributes_are_as_they_were_and_then_as_they_are():
    model = Switched()
    mode = Mode(model)
    model.eval()
    model.enabled, model.scales, model.inner.added = False, (3.0,), 1
    model.active.append("other")
    del model.inner.in_features
    with mode.restored():
        assert model.training and model.inner.training and model.enabled
        assert model.active == ["default"] and model.scales == (1.0, 2.0) and model.inner.in_features == 2
    assert not model.training and not model.inner.training and not model.enabled
    assert model.active == ["default", "other"] and model.scales == (3.0,) and not hasattr(model.inner, "in_features")


def test_the_digest_tells_what_trains_and_what_is_frozen():
    model = Switched()
    digest = Mode(model).digest
    assert Mode(Switched()).digest == digest
    model.enabled = False
    assert Mode(model).digest == digest
    model.inner.eval()
    assert Mode(model).digest != digest
    model.inner.train()
    model.inner.bias.requires_grad_(False)
    mode = Mode(model)
    assert mode.digest != digest and mode.frozen == {"inner.bias"}
