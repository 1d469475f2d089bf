"""Query heads felt least may go, as many of each key/value head."""

from headwise.planning.menus import ATTENTION
from headwise.planning.sensitivity import most_felt
from tests.toy_reduction.change import FewerQueries


def options(request):
    for number, layer in request.layers():
        shared, felt = layer.heads // layer.kv_heads, request.values(number)["head_damage"]
        for count in () if layer.latent else range(shared - 1, 0, -1):
            groups = [felt[start : start + shared] for start in range(0, layer.heads, shared)]
            kept = tuple(shared * g + head for g, group in enumerate(groups) for head in most_felt(group, count))
            change = FewerQueries(kept)
            loss = predicted_loss(layer, request.values(number), change)
            yield (number, ATTENTION), request.option(change.shape(layer), loss, lambda change=change: (change,))


def predicted_loss(layer, values, change):
    return sum(loss for head, loss in enumerate(values["head_damage"]) if head not in change.kept)
