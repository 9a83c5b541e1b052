"""Panels and reports for notebooks and terminals.

## The problem

You want to see whether training makes progress, why it does not, and what the other peers do. This must work on Colab,
Kaggle, JupyterLab, classic Notebook, VS Code and Binder, and as plain text without a front-end (a page that shows
widgets). Watching must not slow down training or make the notebook larger. It must continue to work when you run a
cell again, interrupt it, or close its page.

## The idea

    runtime thread            user's thread                                     browser
      cores, services           panel.refresh()                                 stock ipywidgets: HTML with SVG,
           |                       |      ^                                     buttons, a slider, Play
           |--frozen snapshot----->|      '--- watch(), tick(), Play, click ----'
                                   v
                     view: a pure function, snapshot -> `theme.Document`: HTML, and text with the same content

Only the user's thread changes a widget, because some platforms do not repaint a widget that another thread changes.
The callback of a button gives its work to another thread. The only JavaScript of this package is the *Copy* button of
an invitation. A view has its own style sheet (`colab_swarm.notebook.theme`) for light and dark pages, and never shows
a fact by colour alone.

## Three ways to stay live

| call | while |
|---|---|
| `swarm.panel()` as the last value of a cell | no cell runs: refreshed each second, until you press *Auto-refresh* |
| `swarm.panel().watch()` | its cell runs; ■ stops the watching, not the peer |
| `panel.tick()` after each batch | your training loop runs; draws at most four times a second |

Without a front-end (`jupyter execute`, a terminal, `TERM=dumb`), the panel prints a line every 10 s,
and all pages at the end. Characters that the terminal cannot show are replaced.

## Views

| call | shows | module |
|---|---|---|
| `swarm.panel()`, page *swarm* | step, ETA, loss, speeds, peers, contributions, log | `panel`, `views` |
| page *rounds* | the last 20 rounds: when each member sent and returned its part, or why it was dropped | `views` |
| page *map* | this peer's links: a wider line is a faster link, a dashed line goes through a relay | `views` |
| `swarm.experts.panel(prefix, grid=…)` | live experts, their use, their hosts; your own | `meters` |
| `coordinator.panel()`, `volunteer.panel()` | units, volunteers, accuracy | `units_view` |
| web page of a backbone or coordinator | the panel of each model, or of the job; `/status.json`, `/metrics` | `page` |
| `swarm.elastic.meter()` | inconsistency of an elastic peer, compared with its bound | `meters` |
| `cs.doctor(…)` | traffic lights, each with its fix; with `step=…` the cost of a step | `colab_swarm.swarm.doctor` |
| `cs.join()` without an invitation | runs in the local network | `invitation` |
| `swarm.invite()` | the text, a QR code, badges | `invitation` |
| `simulation.play(train)` | a simulated swarm with sliders and a kill button | `lessons` |
| `cs.replay("run.jsonl")` | a recorded run, offline | `recorder` |
| `cs.explain(error)` | cause and fix of an error | `explanation` |

## Sessions

- **Clock.** Colab and Kaggle end a session after 12 hours, Kaggle's TPUs after 9 (`colab_swarm.notebook.platforms`).
  The panel shows the remaining time. Some minutes before the end the peer hands over its gradients and leaves.
- **Resume.** `cs.join(…, state_dir="folder")` saves this peer's identity, membership and checkpoints in a folder. In a
  later session, `cs.join(state_dir="folder")` is the same peer (`colab_swarm.swarm.saved`). The folder is secret.
  It outlives the session only in a place that the platform keeps: Google Drive, `/kaggle/working`.
- **Pause.** `with swarm.paused():` frees the accelerator for you; the other peers do not wait for this peer.
- **Record.** `swarm.record("run.jsonl")` writes each event as a line of JSON (`colab_swarm.notebook.recorder`).
- **Try.** `swarm.try_model()` fills masks with the newest weights and with the initial ones
  (`colab_swarm.notebook.try_model`).

## Colab and Kaggle

PyTorch and transformers are preinstalled there and are not changed; the other packages install in seconds.

**Read the terms first.** The FAQ of Colab is reported to forbid *running distributed computing
workers* on runtimes without paid compute units, and *peer-to-peer file-sharing* and *connecting to
remote proxies* on all runtimes. If you join a swarm from a free runtime, you run a distributed computing worker. Use
paid units, your own machine, a machine of your lab, or `cs.simulate`, which needs no network and no permission. On
Colab, `cs.join` and `cs.create` require `accept_terms=True`. On Kaggle, read the terms too, and switch the
internet on (*Settings, Internet*; this needs a verified phone number).

Other machines cannot connect to these platforms directly. A tunnel or relay opens there only after a second consent.
On Colab it is "I use paid compute units, and my terms allow tunnels and relays". On Kaggle and Binder it is only the
second part of this sentence.

| consent | what may open on Colab, Kaggle, Binder |
|---|---|
| none | nothing; Colab trains nothing either |
| `accept_terms=True` | a bucket, and links that this peer dials, to peers that accept them and may relay for it |
| `accept_terms="tunnels"` | also iroh's relays, cloudflared and ngrok: by `cs.connect`, or `tunnel=` and `iroh=` |

The form of `cs.connect()` has a box for each consent. It also has a field for the token of ngrok, which the form
empties and does not store. In a shell, the second consent is `--accept-tunnels`. On your own machine there is no second
box.

Tokens of ngrok and Hugging Face come from the platform's secrets, or are typed, and are never shown. The organizer
of a run with an allowlist sees the Hugging Face token of each user who joins, so create a token that may only read. The
form asks before it sends a token; in a script, you agree by `send_hf_token=True`.

## Failures

A view that cannot be drawn does not end the training: the reason is logged, and the training loop draws
nothing for a minute. A second panel of the same swarm works. *Stop cell* interrupts the running
cell if the kernel handles clicks while a cell runs; otherwise use ■. *Leave swarm* needs a second click.

**Security.** Names, reasons and all other texts of peers are escaped and bounded (`colab_swarm.markup`). Invitations
are secrets: only the invitation itself shows its text, and the ``repr`` of no other object contains it.

## Measured

Two cores of a shared virtual machine:

- `panel.throughput_ratio`: training speed with panel and recorder, share of the speed with neither: **102 %**
- `panel.refresh_ms`, `core_share`: processor time of a refresh, share of a core at four a second: **1.4 ms, 0.6 %**
- `panel.memory_mb`, `notebook_kb`: half an hour of refreshes adds to kernel and saved notebook: **0.3 MB, 0.1 kB**

In a copy of the repository, `python -m tests.benchmarks panel` measures again.
"""
