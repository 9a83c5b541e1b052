"""Where links and install lines lead: to the repository that the metadata name, and to no place that does not exist."""

import json
import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, PathDistribution
from pathlib import Path

import pytest

from colab_swarm import project
from tests.publish_links import publish

ROOT = Path(__file__).parent.parent
MINE, YOURS = "https://github.com/alice/swarm", "https://github.com/bob/colab_swarm"
GIT = {"vcs_info": {"vcs": "git", "commit_id": "0" * 40}}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The metadata of a package that is installed from a folder, without URLs."""
    path = tmp_path / "colab_swarm-0.1.0.dist-info"
    path.mkdir()
    (path / "METADATA").write_text("Metadata-Version: 2.4\nName: colab-swarm\nVersion: 0.1.0\n")
    monkeypatch.setattr(project, "distribution", lambda name: PathDistribution(path))
    came_from(path, url=f"file://{tmp_path}", dir_info={"editable": True})
    return path


def came_from(installed: Path, **facts: object) -> None:
    (installed / "direct_url.json").write_text(json.dumps(facts))


def test_a_copy_installs_itself_and_has_no_links(installed: Path) -> None:
    assert project.repository() is None
    assert project.install("train") == 'pip install -e ".[train]" in your copy of colab_swarm'
    assert project.update() == "`git pull` in your copy of colab_swarm"
    assert project.notebook_links("swarm") == {}


@pytest.mark.parametrize("url", [MINE, f"{MINE}.git", f"{MINE}/"])
def test_what_pip_got_from_a_repository_names_it(installed: Path, url: str) -> None:
    came_from(installed, url=url, **GIT)
    assert project.install("train") == f'pip install "colab-swarm[train] @ git+{MINE}"'
    assert project.update() == f'`pip install -U "colab-swarm @ git+{MINE}"`'
    assert project.notebook_links("swarm") == {
        "Colab": "https://colab.research.google.com/github/alice/swarm/blob/main/notebooks/swarm.ipynb",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src={MINE}/blob/main/notebooks/swarm.ipynb",
    }


def test_the_projects_url_counts_where_pip_names_no_repository(installed: Path) -> None:
    with (installed / "METADATA").open("a") as metadata:
        metadata.write(f"Project-URL: Repository, {YOURS}\n")
    assert project.repository() == YOURS
    came_from(installed, url=MINE, **GIT)
    assert project.repository() == MINE
    (installed / "direct_url.json").unlink()
    assert project.repository() == YOURS


@pytest.mark.parametrize(
    "url", ["https://alice:secret@github.com/alice/swarm", "ssh://git@github.com/alice/swarm"]
)
def test_a_url_with_a_name_in_it_is_kept_to_oneself(installed: Path, url: str) -> None:
    came_from(installed, url=url, **GIT)
    assert project.repository() is None


def test_a_repository_elsewhere_installs_but_opens_no_notebook(installed: Path) -> None:
    came_from(installed, url="https://gitlab.com/alice/swarm", **GIT)
    assert "git+https://gitlab.com/alice/swarm" in project.install("train")
    assert project.notebook_links("swarm") == {}


def test_a_package_that_is_not_installed_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> PathDistribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(project, "distribution", distribution)
    assert project.repository() is None


def test_no_link_names_a_placeholder() -> None:
    found = subprocess.run(
        ["git", "grep", "-nIw", "OWN" + "ER"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (1, "")


def git(copy: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(copy), *arguments], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository with the tracked files that name links."""
    names = git(ROOT, "ls-files", "README.md", "pyproject.toml", "notebooks").splitlines()
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "user.name", "alice")
    git(tmp_path, "config", "user.email", "alice@example.org")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "A copy")
    return tmp_path


def text_of(notebook: Path) -> str:
    return "".join(
        "".join(cell["source"]) for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    )


def test_publishing_leads_everything_to_one_address_in_one_commit(copy: Path) -> None:
    publish(copy, YOURS)
    publish(copy, f"{MINE}.git")
    publish(copy, MINE)
    assert git(copy, "log", "--format=%s").splitlines() == [
        f"Links lead to {MINE}",
        f"Links lead to {YOURS}",
        "A copy",
    ]
    assert git(copy, "status", "--porcelain") == ""
    assert tomllib.loads((copy / "pyproject.toml").read_text())["project"]["urls"] == {"Repository": MINE}
    readme = (copy / "README.md").read_text(encoding="utf-8")
    assert f'pip install "colab-swarm[all] @ git+{MINE}"' in readme
    for links in map(project.notebook_links, ("swarm", "volunteer"), (MINE, MINE)):
        assert all(readme.count(f"]({link})") == 1 for link in links.values())
    assert readme.count("mybinder.org/v2/gh/alice/swarm/HEAD") == 1
    notebooks = "\n".join(map(text_of, (copy / "notebooks").glob("*.ipynb")))
    named = re.findall(r"(?:install|wheel) .*(?<=@ git\+)(.*)(?=\")", notebooks)
    assert set(named) == {MINE} and len(named) == 1 + notebooks.count("%pip install")
    assert "bob/" not in readme + notebooks and "your copy of colab_swarm" not in readme + notebooks


def test_publishing_changes_no_output_and_nothing_else_of_a_notebook(copy: Path) -> None:
    publish(copy, MINE)
    changed = [
        line
        for line in git(copy, "show", "--format=", "--unified=0", "notebooks").splitlines()
        if line[:1] in "+-"
    ]
    lines = {line for line in changed if not line.startswith(("+++", "---"))}
    assert lines and all(re.search(r"pip (install|wheel)|your copy|internet, run", line) for line in lines)


@pytest.mark.parametrize(
    "url", ["", "https://gitlab.com/alice/swarm", "github.com/alice/swarm", f"{MINE}/tree/main"]
)
def test_only_a_repository_on_github_is_published(copy: Path, url: str) -> None:
    with pytest.raises(SystemExit, match="it looks like"):
        publish(copy, url)


def test_changes_that_are_not_committed_are_left_alone(copy: Path) -> None:
    (copy / "README.md").write_text("my own text")
    with pytest.raises(SystemExit, match="commit or stash"):
        publish(copy, MINE)
    assert (copy / "README.md").read_text() == "my own text"
