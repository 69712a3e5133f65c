"""Options: what is accepted, and one clear sentence for what is not."""

from __future__ import annotations

import pytest
import torch

import ascend_deep
from ascend_deep.options import Options, OptionsError


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"downsteam": "eager"},
            "unknown option 'downsteam'; valid options are .*Did you mean 'downstream'",
        ),
        ({"downstream": "tensorrt"}, "'downstream' names the value 'tensorrt'; accepted are auto, inductor"),
        ({"target": "ascend910"}, "'target' names the value 'ascend910'; accepted are auto, cpu, cuda, ascend950"),
        ({"verify": True}, "'verify' names the value True; accepted are probe, shadow, off"),
        ({"enable": ["routers"]}, "'enable' names the recogniser 'routers'; accepted are experts_grouped"),
        ({"disable": "router"}, "'disable' is 'router'; it takes a list"),
        ({"enable": ["router"], "disable": ["router"]}, "'router' is both enabled and disabled"),
        ({"strict": 1}, "'strict' is 1; it takes True or False"),
        ({"report": "out.txt"}, "'report' is 'out.txt'; it takes a path ending in .json or .html"),
        ({"inductor": ["x"]}, "'inductor' is .*; it takes a dictionary"),
        ("eager", "options is str; it takes a dictionary"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(OptionsError, match=sentence):
        Options.parse(options)


def test_bad_options_reach_the_user_of_torch_compile():
    run = torch.compile(torch.nn.Linear(3, 4), backend="ascend_deep", options={"vrify": "off"})
    with pytest.raises(Exception, match="unknown option 'vrify'; valid options are"):
        run(torch.randn(2, 3))


def test_unknown_inductor_options_name_valid_ones():
    with pytest.raises(
        OptionsError, match=r"holds 'nonsense', which is no option of Inductor; it has max_autotune, .*"
    ):
        Options.parse({"inductor": {"nonsense": 1}})
    with pytest.raises(OptionsError, match=r"holds 'freezin', .* did you mean 'freezing'"):
        Options.parse({"inductor": {"max_autotune": True, "freezin": True}})
    with pytest.raises(OptionsError, match=r"unknown option 'max_autotune'; .*options=\{'inductor': \{'max_autotune'"):
        Options.parse({"max_autotune": True})
    accepted = {"triton.cudagraphs": False, "pre_grad_custom_pass": None}
    assert Options.parse({"inductor": accepted}).inductor == accepted
    run = torch.compile(torch.nn.Linear(3, 4), backend="ascend_deep", options={"inductor": {"nonsense": 1}})
    with pytest.raises(Exception, match="OptionsError: option 'inductor' holds 'nonsense', which is no option of Ind"):
        run(torch.randn(2, 3))


def test_options_are_frozen_and_hashable_by_key():
    options = Options.parse({"disable": ["swiglu"], "verify": "off"})
    with pytest.raises(AttributeError):
        options.verify = "probe"  # type: ignore[misc]
    assert "swiglu" not in options.recognisers() and "router" in options.recognisers()
    assert options.key() != Options.parse({"verify": "off"}).key()
    assert options.key() == Options.parse({"disable": ("swiglu",), "verify": "off"}).key()


def test_public_names_resolve():
    for name in ascend_deep.__all__:
        assert getattr(ascend_deep, name) is not None
    assert callable(ascend_deep.explain) and callable(ascend_deep.prepare)
    with pytest.raises(AttributeError, match="no attribute 'explane'"):
        _ = ascend_deep.explane


def test_missing_downstream_is_one_sentence():
    run = torch.compile(torch.nn.Linear(3, 4), backend="ascend_deep", options={"downstream": "npu"})
    with pytest.raises(Exception, match="'downstream' is 'npu', which needs torch_npu with torchair"):
        run(torch.randn(2, 3))
