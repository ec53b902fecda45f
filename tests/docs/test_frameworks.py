"""The examples of `examples/frameworks`, where their package is installed."""

import importlib

import pytest

EXAMPLES = {
    "plain_loop": "torch",
    "lightning_fit": "lightning",
    "hf_accelerate": "accelerate",
    "torchrec_dlrm": "torchrec",
    "deepctr_fit": "deepctr_torch",
}


@pytest.mark.filterwarnings("ignore")  # they are the framework's
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_framework_trains_to_the_same_losses_on_a_budget(
    example, pytestconfig, monkeypatch, capsys
):
    pytest.importorskip(EXAMPLES[example])
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "examples" / "frameworks"))
    train = importlib.import_module(example).train

    plain, ours = train(None), train("128KiB")

    assert ours == pytest.approx(plain, abs=1e-6)
    assert ours[-1] < 0.98 * ours[0]
    assert "of fast memory for" in capsys.readouterr().out  # some rows wait elsewhere
