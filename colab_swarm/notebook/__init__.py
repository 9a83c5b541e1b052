"""What a person sees in a notebook or a terminal.

## What problem it solves

Somebody in a notebook wants to see that training goes on, why it does not, and what the others do: on Colab,
Kaggle, JupyterLab, classic Notebook, VS Code and Binder, and in plain text where there is no front-end.
Watching must not slow training down, grow the notebook, or break when a cell is run again, interrupted, or
its page closed.

## The idea

    runtime thread            user's thread                                     browser
      cores, services           panel.refresh()                                 stock ipywidgets: HTML with SVG,
           |                       |      ^                                     buttons, a slider, Play
           |--frozen snapshot----->|      '--- watch(), tick(), Play, click ----'
                                   v
                     view: a pure function, snapshot -> HTML, and snapshot -> text that says the same

Only the thread that the user works in touches a widget: some platforms do not repaint what other threads
change. A button's callback hands its wish to a thread and returns at once. There is no JavaScript of ours, no
`Output` widget and no live matplotlib. A view brings its own style sheet (`colab_swarm.notebook.theme`): light
and dark, contrast of 4.5 to 1 or more, nothing told by colour alone.

## Three ways to stay live

| call | while |
|---|---|
| `swarm.panel()` as the last value of a cell, then ▶ | no cell runs: the browser asks each second |
| `swarm.watch()` | its cell runs; ■ ends the watching and not the peer |
| `panel.tick()` after each batch | your training loop runs; draws four times a second at most |

Where there is no front-end (`jupyter execute`, a terminal, `TERM=dumb`) lines are printed each 10 s, and all
pages at the end; characters that the terminal does not know are replaced.

## What there is to see

| call | shows | module |
|---|---|---|
| `swarm.panel()`, page *swarm* | step, time to the next, loss, speeds, peers, leaderboard, log | `render` |
| page *rounds* | who waited, sent, gave means, was dropped and why; the last 20 rounds | `rounds` |
| page *map* | this peer's links, as wide as the lines are fast; dashed by way of a relay | `swarm_map` |
| `swarm.experts_panel(prefix, grid=…)` | which experts live, how much they are used; mine | `experts`, `expert_grid` |
| `coordinator.panel()`, `volunteer.panel()` | units, volunteers, accuracy | `coordinator_view`, `volunteer_view` |
| `swarm.consistency_meter()` | how far an elastic peer is off, beside the bound | `consistency` |
| `cs.doctor(…)` | traffic lights, each with its fix | `doctor` |
| `cs.join()` without an invitation | runs in the local network | `lan` |
| `swarm.invite()` | the line, a QR code, badges | `invitation` |
| `simulation.play(train)` | a simulated swarm with sliders and a kill button | `lesson`, `lesson_controls` |
| `cs.replay("run.jsonl")` | a recorded run, offline | `replay` |
| the loss beside a published run's | whether that is warm-up or a fault | `loss_band` |

## Sessions

- **Clock.** Colab and Kaggle end a session after 12 hours, Kaggle's TPUs after 9
  (`colab_swarm.notebook.platforms`). The panel shows what is left, and some minutes before the end the peer hands
  over what it has and leaves.
- **Coming back.** After `cs.join(…, state_dir="folder")`, `cs.resume("folder")` is the same peer in a later
  session: identity, membership, checkpoints (`colab_swarm.swarm.saved`). The folder is secret, and lasts where
  the platform keeps it: Drive, `/kaggle/working`.
- **Your own work.** `with swarm.paused():` gives you the accelerator; others do not wait for this peer
  meanwhile.
- **The record.** `swarm.record("run.jsonl")` writes each event as a line of JSON (`colab_swarm.notebook.recorder`).
- **Asking.** `swarm.try_model()` shows what the newest weights answer, beside those that this peer began with
  (`colab_swarm.notebook.try_model`).
- **Thanks.** `swarm.receipt()` is what others saw this peer give, signed by them.

## Colab and Kaggle

PyTorch and transformers are there already and stay as they are; the rest installs in seconds.

**Read the terms first.** The FAQ of Colab is reported to forbid *running distributed computing workers* on
runtimes without paid compute units, and *peer-to-peer file-sharing* and *connecting to remote proxies* on
all. Joining a swarm from a free runtime is the first of these. Use paid units, your own machine, a lab's, or
`cs.simulate`, which needs no network and no permission. On Colab, `cs.join` and `cs.create` ask for
`accept_terms=True`. On Kaggle, read the terms as well, and switch the internet on (*Settings,
Internet*; it wants a verified phone number). What is known of each platform is in
`colab_swarm.notebook.platforms`.

Tokens (ngrok's, Hugging Face's) are taken from the platform's secrets and never shown. An organizer of an
allowlist sees the Hugging Face tokens of those who join: make one that may only read.

## What goes wrong

A view that cannot be drawn does not end the training: the reason is logged, and the loop is spared it for a
minute. A second panel of the same swarm works. *Stop* interrupts the running cell where the kernel takes
clicks meanwhile; elsewhere use ■. *Leave* asks once more. What a fault means, why it happened and what to do
next: `cs.explain(error)` (`colab_swarm.errors`, `colab_swarm.notebook.explanation`).

**Security.** Names, reasons and everything else that peers tell is escaped and bounded
(`colab_swarm.markup`). Invitations are secrets: they show themselves when asked, and nobody else's ``repr``
holds one.

## Measured

With the panel open and the flight recorder on, training is no slower (1.02 of the speed with neither,
measured in turns). A refresh costs 1.4 ms of processor time, four a second 0.6 % of a core; half an hour of
them adds 0.3 MB to the kernel and 0.1 kB to the saved notebook. `python -m colab_swarm.bench panel` measures
again.
"""
