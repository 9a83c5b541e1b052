"""Lead all links to the repository where a copy is published: ``make publish-links URL=https://github.com/NAME/REPO``.

It writes the URL into pyproject.toml, the install lines of README and notebooks, and the badges of the
README, and commits these files. Run it again for another URL.
"""

import re
import subprocess
import sys
from pathlib import Path

from colab_swarm.project import COPY, GITHUB, notebook_links

ROOT = Path(__file__).parent.parent
IMAGES = {
    "Colab": "https://colab.research.google.com/assets/colab-badge.svg",
    "Kaggle": "https://kaggle.com/static/images/open-in-kaggle.svg",
    "Binder": "https://mybinder.org/badge_logo.svg",
}
FROM_A_COPY = re.compile(rf"^.*# in {COPY}.*\n|, in {COPY}(?=, run:)", re.MULTILINE)
SOURCE = r"(?:-e )?(\\?\")(?:\.{1,2}\[([\w,]+)\]|colab-swarm\[([\w,]+)\] @ git\+[^\"\\]+)\\?\""
INSTALL = re.compile(rf"(pip (?:install|wheel) (?:-q |-w stick )?){SOURCE}")
BADGE = re.compile(r" \[!\[Open in \w+\]\([^)]*\)\]\([^)]*\)")
OPENS = re.compile(
    r"^\| \[[^]]+\]\(notebooks/(\w+)\.ipynb\)(?= \|)|\[first tutorial\]\([^)]+\)", re.MULTILINE
)
URLS = re.compile(r"\[project\.urls\]\n.*\n\n")
EXTRAS = "[project.optional-dependencies]\n"


def lead_to(url: str, text: str) -> str:
    """Return a notebook's or the README's text with install lines that name ``url``."""
    named = INSTALL.sub(lambda m: f"{m[1]}{m[2]}colab-swarm[{m[3] or m[4]}] @ git+{url}{m[2]}", text)
    return FROM_A_COPY.sub("", named)


def with_badges(url: str, readme: str) -> str:
    """Return the README with badges behind its links to notebooks in tables and to the first tutorial."""
    first = (
        f"https://mybinder.org/v2/gh/{url.partition('.com/')[2]}/HEAD?labpath=tutorials/01_first_swarm.ipynb"
    )

    def badges(found: re.Match[str]) -> str:
        links = notebook_links(found[1], url) if found[1] else {"Binder": first}
        shown = (f" [![Open in {name}]({IMAGES[name]})]({link})" for name, link in links.items())
        return found[0] + "".join(shown)

    return OPENS.sub(badges, BADGE.sub("", readme))


def publish(root: Path, url: str) -> None:
    """Rewrite and commit; raises SystemExit with the reason if it cannot."""
    url = url.removesuffix("/").removesuffix(".git")
    if not GITHUB.fullmatch(url):
        raise SystemExit(f"URL={url!r}: it looks like https://github.com/NAME/REPO")
    git = ["git", "-C", str(root)]
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], check=True, capture_output=True)
    if changed.stdout:
        raise SystemExit("commit or stash your changes first")
    project, readme = root / "pyproject.toml", root / "README.md"
    given = URLS.sub("", project.read_text(encoding="utf-8"))
    project.write_text(
        given.replace(EXTRAS, f'[project.urls]\nRepository = "{url}"\n\n{EXTRAS}'), encoding="utf-8"
    )
    for path in (readme, *(root / "notebooks").glob("*.ipynb")):
        path.write_text(lead_to(url, path.read_text(encoding="utf-8")), encoding="utf-8")
    readme.write_text(with_badges(url, readme.read_text(encoding="utf-8")), encoding="utf-8")
    if subprocess.run([*git, "diff", "--quiet"], check=False).returncode:
        subprocess.run([*git, "commit", "-q", "-a", "-m", f"Links lead to {url}"], check=True)


if __name__ == "__main__":
    publish(ROOT, sys.argv[1])
