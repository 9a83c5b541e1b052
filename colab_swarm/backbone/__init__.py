"""The peer that stays: keeps a run's checkpoints, collects what its peers tell, and shows it on a web page.

## What problem it solves

At least one peer of a run must be reachable, and a run must outlive its trainers. A *backbone*, on any cheap
machine with an open port, is entry point, relay, reducer and keeper of checkpoints. It needs no GPU and no
PyTorch.

## How to use it

    pip install .
    colab-swarm backbone my-run --port 4500 --identity backbone.key      # prints the invitation
    colab-swarm backbone run.toml                                        # the same from a file, with dashboard

`--identity` keeps its key: after a restart it is the same peer and the same run, and old invitations stay
good until they end. Behind a port forwarding tell the address with `--announce ws://203.0.113.7:4500`.
`colab_swarm.backbone.config` shows all keys of the file; flags of the command line do not apply to it. The
dashboard is at http://127.0.0.1:8080/; from elsewhere use an SSH tunnel. Set `HF_TOKEN` to push checkpoints
to the Hub. To begin anew under the same name, move the run's folder away.

## What it does

| part | module |
|---|---|
| organizes rounds, reduces, hands on the state | `colab_swarm.training.assistant`, `mirror` |
| relays | `colab_swarm.net.relay` |
| keeps checkpoints while there are trainers, and gives the newest when there are none | `keeper`, `vault` |
| collects progress, losses, rounds, who is there | `observer`, `curve`, `roster`, `journal` |
| shows them: page, `/metrics` for Prometheus, JSON | `view`, `page`, `web`, `prometheus` |
| pushes to the Hub; forwards curves to Weights & Biases or trackio | `hub`, `forward` |

The loss of a step is the median over the trainers, weighted by their speeds, of which none counts for more
than the median one: a lying minority cannot move the curve. Volunteers hold no key of any dashboard: what
they tell are signed records.

## What goes wrong

Killed at any moment, it goes on with the same file and port. When nobody trains who is as far as the newest
checkpoint, it tells a progress record of that step, as a peer that cannot reduce: any trainer that is further
outvotes it, and newcomers fetch the state from it. Whatever the Hub does, the run goes on. The page is
read-only and made once a second at most.
"""
