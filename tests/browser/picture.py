"""The picture of the panel in README: `make picture` draws it from the panel of today, in a real JupyterLab.

The PNG holds the digest of the panel that it shows, so that a test notices when they differ.
"""

import hashlib
import io
import tempfile
from pathlib import Path

from colab_swarm.notebook import panel, theme, views
from tests.browser.chromium import Window, browsing
from tests.browser.lab import CELL, Lab
from tests.notebook.test_rounds import TOLD

PICTURE = Path(__file__).parents[2] / "tutorials" / "images" / "panel.png"
KEY = "panel"
"""Of the PNG's text that holds the digest."""
TRAINED = """import torch
from sklearn.datasets import load_digits
import colab_swarm as cs
from colab_swarm.averaging.messages import Chunk
from colab_swarm.notebook.panel import Panel
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
def train(swarm):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 4000), torch.nn.ReLU(), torch.nn.Linear(4000, 10))
    adam = torch.optim.Adam(model.parameters(), lr=3e-4)
    optimizer = swarm.optimizer(adam, target_batch_size=256, model=model)
    rng = torch.Generator().manual_seed(len(swarm.name))
    while optimizer.global_step < 24:
        chosen = torch.randint(len(x), (16,), generator=rng)
        loss = torch.nn.functional.cross_entropy(model(x[chosen].float() / 16), y[chosen])
        loss.backward()
        optimizer.step(samples=16, loss=loss.item())
simulation = cs.simulate(4)
for name, speed in {"alice": 12.0, "bob": 20.0, "carol": 9.0, "dave": 15.0}.items():
    simulation._speeds[name] = speed
def last_round(sent):
    return isinstance(sent, Chunk) and simulation.swarms["alice"].optimizers["model"].global_step == 23
simulation.network.when(last_round, sender="dave", nth=2).crash("dave")
simulation.run(train, seconds=600.0)
alice = simulation.swarms["alice"]
print([fault.name for fault in simulation.network.fired], alice.snapshot().step)
Panel(alice.snapshot, alice.leave, pause=lambda wanted: None)"""


def digest() -> str:
    """Return a digest of all that the picture shows, but for the run: the views, their style, the controls."""
    live = panel.Panel(lambda: TOLD, lambda: None, pause=lambda wanted: None, live=True)
    controls = [str(getattr(one, "description", "")) for one in live._box.children[0].children]
    shown = views.draw(TOLD).html(), views.draw_rounds(TOLD).html(), theme.STYLE, panel.PLAY_STYLE, *controls
    return hashlib.sha256("\n".join(shown).encode()).hexdigest()[:16]


def main() -> None:
    from PIL import Image, PngImagePlugin

    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab, browsing() as browser:
        window = Window(browser, Path(folder), device_scale_factor=2)
        notebook = lab.open(window, "picture", [TRAINED])
        notebook.page.set_viewport_size({"width": 1240, "height": 2000})
        print(notebook.run(0).splitlines()[0])
        shown = notebook.page.locator(f"{CELL} >> .widget-vbox").first
        parts = [Image.open(io.BytesIO(shown.screenshot()))]
        notebook.click("rounds")
        notebook.page.locator('.cs-view[aria-label="averaging rounds"]').wait_for()
        parts.append(Image.open(io.BytesIO(shown.screenshot())))
    width, height = max(part.width for part in parts), sum(part.height for part in parts)
    picture, top = Image.new("RGB", (width, height), "white"), 0
    for part in parts:
        picture.paste(part, (0, top))
        top += part.height
    text = PngImagePlugin.PngInfo()
    text.add_text(KEY, digest())
    picture.quantize(128).save(PICTURE, pnginfo=text, optimize=True)
    print(PICTURE)


if __name__ == "__main__":
    main()
