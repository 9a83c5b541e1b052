"""Tensors on the wire and on disk: codecs, error feedback, flat vectors, states as files.

Gradients of millions of values cross slow links, are summed by peers without PyTorch, and come from strangers. So
every codec knows its encoded size in advance, decodes in pieces, and rejects invalid input. Nothing is pickled.

## Codecs

float32, float16 and bfloat16 cast values. int8 and onebit scale blocks. topk and sparseloco send the
largest values only, and a float16 mean of them travels without its zeros. The table in `colab_swarm.tensors.codecs`
has sizes and errors. `adaptive` is int8, but float16 for small tensors. Use onebit, topk and sparseloco with
**error feedback**, which sends the values cut off one vector with the next:

    w = residual + g;   send Q(w);   residual <- w - Q(w)

Each codec states gamma, ``||Q(w) - w||^2 <= gamma ||w||^2``, from which `colab_swarm.elastic` derives its bound.

## Modules

| subject | module |
|---|---|
| codecs, error feedback; codecs on devices | `colab_swarm.tensors.codecs`, `colab_swarm.tensors.device_codecs` |
| those of the largest values; their parts | `colab_swarm.tensors.sparse`, `colab_swarm.tensors.vectors` |
| a model's gradients as one flat float32 vector | `colab_swarm.training.flat` |
| any training state as named tensors and a plain skeleton, in one safetensors file | `colab_swarm.tensors.statedict` |
| a state as hashed chunks, fetched from several donors | `colab_swarm.tensors.chunks` |

Everything is little-endian, and numpy but for tensors on a device; a relay or reducer never loads torch.
"""
