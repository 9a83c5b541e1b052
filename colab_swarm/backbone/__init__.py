"""The peer that stays: it saves a run's checkpoints, collects its losses, and shows them on a web page.

## The problem

A run needs one peer that others can always reach, and it must outlive its trainers. A *backbone*,
on any cheap machine with an open port, is entry point, relay, reducer and store of checkpoints. It
needs no GPU and no PyTorch.

## How to use it

    colab-swarm create my-run --port 4500 --identity backbone.key   # prints the invitation
    colab-swarm create run.toml                                # the same from a file, with dashboard

`--identity` saves its key: after a restart it is the same peer and the same run, and old
invitations stay valid until they expire. `colab_swarm.backbone.config` shows all keys of the file;
flags of the command line do not apply to it. The dashboard is at http://127.0.0.1:8080/; from
another machine use an SSH tunnel. Set `HF_TOKEN` to push checkpoints to the Hub.

## Behind nginx

Networks that let only HTTPS out let peers reach a backbone at port 443 of a web server. Set
``announce = ["wss://run.example.org"]`` in the file, or `--announce`, and give nginx this:

    server {
        listen 443 ssl;
        server_name run.example.org;
        ssl_certificate /etc/ssl/run.pem;
        ssl_certificate_key /etc/ssl/run.key;
        location / {
            proxy_pass http://127.0.0.1:4500;
            proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $http_connection;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        }
    }

Links ping every 10 s, so nginx's time-outs of 60 s may stay. nginx and the backbone are on one
machine, for otherwise peers would take nginx for the other end. Invitations are then links to
``https://run.example.org/join``, where a browser sees how to join.

## Parts

| part | module |
|---|---|
| organizes rounds, reduces, serves the state | `colab_swarm.training.assistant` |
| relays | `colab_swarm.net.relay` |
| saves checkpoints while there are trainers, serves the newest when there are none, collects losses | `keeper` |
| shows them: page, `/metrics` for Prometheus, `/status.json` | `colab_swarm.notebook.page` |
| tells browsers that follow an invitation how to join, at ``/join`` of an https address | `colab_swarm.notebook.page` |
| connects all of these | `backbone` |

A lying minority cannot move the curve of losses. Volunteers hold no key of any dashboard: their
reports are signed records.

## Failures

Killed at any moment, it continues with the same file and port. When no trainer is as far as the
newest checkpoint, late joiners get that one (`keeper`). The run does not depend on the Hub. The
page is read-only and rendered once a second at most.
"""
