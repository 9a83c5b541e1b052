"""Stand-ins for the tunnel programs: same command lines and logs; the edge is a port on loopback."""

import sys
from pathlib import Path

HERE = Path(__file__).parent


def install(name: str, folder: Path) -> str:
    """An executable ``ngrok`` or ``cloudflared`` in the folder; returns its path."""
    path = folder / name
    path.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(HERE)!r})\nimport {name}\n{name}.main()\n"
    )
    path.chmod(0o755)
    return str(path)
