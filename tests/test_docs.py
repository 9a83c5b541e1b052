"""The README and the pages: named things exist; each protocol and public name has a description."""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.cli.__main__ import main
from colab_swarm.sim import profiles
from colab_swarm.swarm.elastic import SwarmElastic
from colab_swarm.swarm.experts import SwarmExperts
from colab_swarm.swarm.work import SwarmWork
from tests.integrations.test_trainer import trainer_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FROM_HIVEMIND = (ROOT / "tutorials/from_hivemind.md").read_text(encoding="utf-8")
FOR_USERS = {"README": README, "from_hivemind": FROM_HIVEMIND}
CONTRIBUTING = (ROOT / ".github/CONTRIBUTING.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGES = sorted(path.parent for path in (ROOT / "colab_swarm").glob("*/__init__.py"))
PROTOCOLS = (
    "averaging",
    "dht",
    "elastic",
    "mailbox",
    "moe",
    "net",
    "notebook",
    "sim",
    "training",
    "trust",
    "workunits",
)
PAGE_LINES = 45


def summary(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""


def page(package: Path) -> str:
    """Return the page on a room: its README.md, else what its package says."""
    readme = package / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else summary(package)


@pytest.mark.parametrize("name", cs.__all__)
def test_a_public_name_says_in_a_sentence_what_it_is(name: str) -> None:
    first = (inspect.getdoc(getattr(cs, name)) or "").partition("\n\n")[0].strip()
    assert re.match(r"[A-Z`].{10,}[.:]$", first, re.DOTALL), f"{name}: {first!r}"


@pytest.mark.parametrize("package", PAGES, ids=lambda path: path.name)
def test_a_package_says_in_a_sentence_what_it_is(package: Path) -> None:
    assert re.match(r"[A-Z].{20,}[.`]$", summary(package).partition("\n")[0])


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_has_a_page(name: str) -> None:
    text = page(ROOT / "colab_swarm" / name)
    assert len(text.splitlines()) >= PAGE_LINES
    assert "Failures" in re.findall(r"^## (.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("package", PAGES, ids=lambda path: path.name)
def test_modules_named_on_a_page_exist(package: Path) -> None:
    for named in re.findall(r"`colab_swarm\.([a-z_.]+)", page(package)):
        path = ROOT / "colab_swarm" / named.rstrip(".").replace(".", "/")
        there = path.is_dir() or path.with_suffix(".py").exists()
        inside = path.parent.with_suffix(".py")
        assert there or (inside.exists() and path.name in inside.read_text(encoding="utf-8")), named


@pytest.mark.parametrize(
    "page", ["colab_swarm/trust/ONE_MEMBER.md", ".github/ARCHITECTURE.md", ".github/CONTRIBUTING.md"]
)
def test_the_tests_exist_that_a_page_names(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    tests = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    names = re.findall(r"`(test_\w+)`", text)
    assert len(names) > 20
    missing = [name for name in names if not any(f"def {name}(" in source for source in tests.values())]
    files = re.findall(r"`(\w+/test_\w+\.py)`", text)
    missing += [name for name in files if not {Path(name), Path("tests", name)} & tests.keys()]
    assert not missing


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) <= 190


def test_links_of_the_readme_exist() -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", README)
    links += re.findall(r"(?:/blob/main/|labpath=|src=\")([^\s\")]+)", README)
    files = [link for link in links if not link.startswith("http")]
    assert len(files) > 15
    assert [link for link in files if not (ROOT / link).exists()] == []


def test_badges_of_the_readme_have_addresses() -> None:
    used = set(re.findall(r"\]\[([a-z-]+)\]", README))
    defined = set(re.findall(r"^\[([a-z-]+)\]: ", README, re.MULTILINE))
    assert used == defined


def test_commands_of_the_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)`", README + CONTRIBUTING)) <= targets
    (further,) = re.findall(r"^Further: (.*?): see", CONTRIBUTING, re.MULTILINE)
    assert set(re.findall(r"`([a-z-]+)`", further)) <= targets
    main(["--help"])
    commands = set(re.findall(r"│ ([a-z-]+) ", capsys.readouterr().out))
    assert set(re.findall(r"colab-swarm ([a-z-]+)", README + FROM_HIVEMIND)) <= commands


def test_ci_runs_the_commands_of_the_readme() -> None:
    assert {"make check", "make test"} <= set((ROOT / ".ci/run").read_text().splitlines())
    assert "`make test`" in README and "`make check`" in README


def test_the_workflow_runs_the_commands_of_the_readme_on_each_python() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = workflow["jobs"]
    # YAML 1.1 reads the key `on` as true
    assert {"push", "pull_request", "schedule"} <= workflow[True].keys()
    commands = {
        job: [step["run"] for step in jobs[job]["steps"] if "run" in step]
        for job in ("test", "lowest", "newest")
    }
    assert commands["test"][:2] == ["make check", "make test"]
    assert (commands["lowest"], commands["newest"]) == (["make test-lowest"], ["make test CONSTRAINTS="])
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    lowest = re.search(r"requires-python = \">=(.*)\"", (ROOT / "pyproject.toml").read_text())
    assert versions == ["3.11", "3.12", "3.13"] and lowest is not None and lowest[1] == versions[0]
    assert "schedule" not in jobs["test"]["if"].partition("!=")[0]
    assert all("github.event_name == 'schedule'" in jobs[job]["if"] for job in ("lowest", "newest"))


@pytest.mark.parametrize(("setting", "option"), [("", "-c constraints.txt"), ("CONSTRAINTS=", "")])
def test_make_installs_known_good_versions_or_the_newest(setting: str, option: str) -> None:
    command = ["make", "-n", "--always-make", ".venv/installed", *filter(None, [setting])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "all,dev" in line]
    assert ("-c constraints.txt" in line) is bool(option)


def test_the_readmes_install_names_known_good_versions_and_the_index_of_a_torch_for_cpus() -> None:
    (block,) = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    options = block.split()
    assert options[options.index("-c") + 1] == "constraints.txt"
    assert options[options.index("--extra-index-url") + 1] == "https://download.pytorch.org/whl/cpu"


def code_of(text: str) -> list[ast.AST]:
    """Return a page's blocks of Python, but for those of hivemind, and what stands between backticks and is Python."""
    blocks = [block for block in PYTHON.findall(text) if "import hivemind" not in block]
    trees: list[ast.AST] = [ast.parse(block) for block in blocks]
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        try:
            trees.append(ast.parse(span.replace("…", "_")))
        except SyntaxError:
            # a command, or a part of a call
            continue
    return trees


ROOMS: dict[str, type] = {"experts": SwarmExperts, "elastic": SwarmElastic, "work": SwarmWork}


def public(dotted: str) -> Any:
    """Return what a name such as ``swarm.experts.host`` stands for. An AttributeError if there is no such thing."""
    first, *rest = dotted.split(".")
    thing: Any = {"cs": cs, "swarm": cs.Swarm, "optimizer": cs.SwarmOptimizer}[first]
    for name in rest:
        if thing is cs.Swarm and name in ROOMS:
            thing = ROOMS[name]
        else:
            thing = getattr(thing, name)
    return thing


@pytest.mark.parametrize("page", FOR_USERS)
def test_names_on_a_page_for_users_are_public_and_so_are_the_arguments(page: str) -> None:
    nodes = [node for tree in code_of(FOR_USERS[page]) for node in ast.walk(tree)]
    named = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    named = {name for name in named if re.fullmatch(r"(cs|swarm|optimizer)(\.\w+)+(?<!\.ipynb)", name)}
    assert len(named) > 10
    for name in named:
        public(name)
    for call in nodes:
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in named:
            continue
        parameters = inspect.signature(public(ast.unparse(call.func))).parameters
        given = {keyword.arg for keyword in call.keywords}
        takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        assert takes_more or given <= parameters.keys(), ast.unparse(call)


@pytest.mark.slow
def test_the_script_for_users_of_hivemind_is_as_short_and_trains() -> None:
    theirs, ours = PYTHON.findall(FROM_HIVEMIND)
    ast.parse(theirs)
    assert len(ours.splitlines()) <= len(theirs.splitlines()) <= 30
    # a simulated peer is in its run already
    meet = re.search(r"^swarm = .*\nprint\(swarm.invite\(\)\)\n", ours, re.MULTILINE)
    assert meet is not None
    code = ours.replace(meet[0], "").replace("2048", "256").replace("max_steps=100", "max_steps=4")

    def train(swarm: cs.Swarm) -> tuple[int, torch.Tensor]:
        names: dict[str, Any] = {"swarm": swarm}
        exec(code, names)
        return names["optimizer"].global_step, names["model"].weight

    with cs.simulate(2) as simulation:
        (step, weight), (other_step, other_weight) = simulation.run(train).values()
    assert step == other_step == 4 and torch.equal(weight, other_weight)


def test_the_first_change_in_contributing_makes_its_test_pass() -> None:
    test, change = map(textwrap.dedent, PYTHON.findall(CONTRIBUTING))
    names = dict(vars(profiles))
    with pytest.raises(AssertionError):
        exec(test, names)
    exec(change, names)
    exec(test, names)


NUMBER = re.compile(r"-?\d+\.\d+")
EXAMPLE, YOU, FRIEND, ATTACH = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TRAIN = EXAMPLE.partition("with cs.simulate")[0]


def in_any_order(line: str) -> str:
    """Return a line without its numbers; the peers of a result are sorted, as any may be the first to end."""
    return ", ".join(sorted(NUMBER.sub("#", line).strip("{}").split(", ")))


@pytest.mark.slow
def test_the_first_example_in_the_readme_prints_what_is_shown(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    printed = set(map(in_any_order, done.stdout.splitlines()))
    assert set(map(in_any_order, shown.splitlines())) - printed == {"…"}
    assert len(set(re.findall(r"weights (\S+)'", done.stdout))) == 1
    losses = [float(loss) for loss in re.findall(r"alice: step . of 8: loss (\S+),", done.stdout)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_you_and_your_friend_in_the_readme_train_together(tmp_path: Path) -> None:
    def run(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-c", TRAIN + code]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    def read_until(peer: subprocess.Popen[str], found: str) -> str:
        assert peer.stdout is not None
        return next(line.strip() for line in peer.stdout if found in line)

    with run(YOU) as you:
        invitation = read_until(you, "digits.")
        with run(FRIEND.replace("swarm://digits.…", invitation)) as friend:
            for peer in (friend, you):
                assert "of 10000: loss" in read_until(peer, "from 2 peers")
            friend.kill()
        you.kill()


def test_the_address_in_the_readme_is_announced() -> None:
    (call,) = re.findall(r"`(cs\.create\(.*NetworkOptions\(port=.*?)`", README)
    with eval(call.replace("port=4500", "port=0")) as swarm:
        assert swarm.services.peers.contact.addresses == ("ws://203.0.113.7:4500",)


@pytest.mark.slow
def test_the_trainer_in_the_readme_trains(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    parts = {"model": trainer.model, "args": trainer.args, "data": trainer.train_dataset}
    code = ATTACH.replace("data)", "data, data_collator=collator)").replace("256", "8").replace("500)", "2)")
    names: dict[str, Any] = {"cs": cs, "collator": trainer.data_collator, **parts}
    exec(code, names)
    assert names["trainer"].state.global_step == 2


@pytest.mark.slow
def test_the_bucket_of_its_page_may_be_a_folder(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(TRAIN, names)
    model = names["model"] = names["Linear"](64, 10)
    names["adam"] = names["torch"].optim.AdamW(model.parameters())
    text = (ROOT / "colab_swarm/mailbox/README.md").read_text(encoding="utf-8")
    example = "".join(re.findall(r"^ +(?:swarm = cs.create|optimizer = swarm).*\n", text, re.MULTILINE))
    code, replaced = re.subn(r"s3://[^\"]+", (tmp_path / "mailbox").as_uri(), example.replace("    ", ""))
    assert replaced == 1
    exec(code.replace('"folder"', repr(str(tmp_path / "peer"))), names)
    with names["swarm"]:
        while not names["optimizer"].global_step:
            model(names["images"].float().flatten(1)).sum().backward()
            names["optimizer"].step(samples=256)
    written = list(tmp_path.glob("mailbox/runs/*/model/rounds/00000000-*/*"))
    assert len(written) == 2  # a contribution and a manifest
