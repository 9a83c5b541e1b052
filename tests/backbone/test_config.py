"""``run.toml``."""

from pathlib import Path

import pytest

import colab_swarm as cs
from colab_swarm.backbone import config
from colab_swarm.backbone.backbone import serve
from colab_swarm.backbone.config import RunFile, read_run_file


def read(folder: Path, text: str) -> RunFile:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return read_run_file(path)


def test_the_example_in_the_documentation_is_read(tmp_path: Path) -> None:
    example = (config.__doc__ or "").partition("\n")[2]
    run = read(tmp_path, example)
    assert run.folder == str(tmp_path / "sahajbert") and run.allowlist is not None
    assert run.options.port == 4500 and run.options.announce == ("ws://203.0.113.7:4500",)
    assert run.options.relay.total_bps == 200e6  # type: ignore[union-attr]
    assert run.options.identity == tmp_path / "sahajbert" / "identity"
    (kept,) = run.collaborations
    assert (kept.every_steps, kept.keep, kept.repo) == (50, 3, "neuropark/sahajBERT")


def test_a_name_is_enough(tmp_path: Path) -> None:
    run = read(tmp_path, 'name = "small"')
    assert run.collaborations[0].name == "model" and run.allowlist is None
    assert run.dashboard.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('name = "a"\nacces = "open"', r"run\.toml.*unknown field `acces`"),
        ('name = "a"\n[[collaborations]]\nevery_step = 5', r"`every_step`.*collaborations"),
        ('name = "a"\n[network]\nport = 99999', r"<= 65535.*network\.port"),
        ('name = "a"\n[[collaborations]]\nkeep = 0', r">= 1.*keep"),
        ('name = "a"\n[[collaborations]]\n[[collaborations]]', "a name of its own"),
        ('name = "a"\n[[collaborations]]\nname = "../x"', r"collaborations.*name"),
        ('name = "a"\n[settings]\nbatch = true', r"`int \| float \| str`, got `bool`.*settings"),
        (f'name = "a"\n[settings]\ntokenizer = "{"x" * 65}"', r"<= 64.*settings"),
        ("name = ", "Invalid value"),
        ("", "missing required field `name`"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        read(tmp_path, text)


def test_settings_travel_with_the_invitation_which_is_good_after_a_restart(tmp_path: Path) -> None:
    text = """
        name = "a"
        network = {port = PORT, lan = false}
        dashboard = {enabled = false}
        settings = {tokenizer = "me/own"}
    """
    quiet = cs.NetworkOptions(lan=False)
    wanted = {"tokenizer": "me/own"}
    with (
        serve(read(tmp_path, text.replace("PORT", "0"))) as backbone,
        cs.join(backbone.invite, peer_name="alice", options=quiet) as alice,
        cs.join(alice.invite(settings=wanted), peer_name="bob", options=quiet) as bob,
    ):
        assert alice.settings == bob.settings == wanted
        for other in ({"settings": {"tokenizer": "alice/own"}}, {"hours": 1.0, "settings": wanted}):
            with pytest.raises(PermissionError, match=r"ask the organizer for another one: .*\[settings\]"):
                alice.invite(**other)
        invitation, network = backbone.invite, backbone.swarm.network
    assert network is not None
    with (
        serve(read(tmp_path, text.replace("PORT", str(network.node.port)))) as again,
        cs.join(invitation, peer_name="alice", options=quiet) as alice,
    ):
        assert again.swarm.id == backbone.swarm.id
        assert (alice.run_id, alice.settings) == (backbone.swarm.run_id, wanted)
