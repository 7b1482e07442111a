"""What the attention of a model does on one image: maps of any mechanism, row by row, never N×N.

    seen = look(model, image)                one forward; image is (1, channels, height, width), as the model takes it
    seen.layers, seen.size                   in the order of the model; height and width of the image
    seen.layer(5), seen.layer("blocks.5.attn"), seen.layer(-1)

    layer.index, .name, .mechanism, .heads   what it is; layer.windows is how many it looks at, mostly one
    layer.grid, layer.key_grid               where queries and keys lie: prefix tokens first, then patches row by row
    layer.note                               what the map does not show (a filter, a gate, an output norm), or ""

    layer.at(x, y, seen.size)                the query at a pixel of the model's input
    layer.class_token()                      the class token's query, or an error where there is none
    layer.row(query)                         (heads, keys): what that query takes from each key
    layer.pooled()                           (heads, keys): the mean over all queries
    layer.pull(weights)                      (heads, keys): weights · map, for weights (queries,); layer.one(query)
    seen.rollout(layer, weights)             (keys,): weights through the layers up to this one, with their residuals
    layer.picture(row)                       (…, height, width) on the keys' grid, prefix tokens left out
    layer.patch_features()                   (patches, channels) that the block around it puts out, or None

    rows = Rows(layer, seen.size)            some queries of a layer, evenly over the picture
    rows.statistics()                        their entropy, effective rank, distance in pixels
    rows.distance_to(other)                  total variation and cosine between two models' maps of a layer

Rows are computed when they are asked for, in memory linear in the tokens: `linvit.attention.rows`. `look` makes a twin
of a model that is not converted yet, so that timm's own attention is seen as well; who looks often makes it once, by
`watchable(model, size)`. Nothing changes after `look`, and several threads may ask. Of mechanisms without a map (XCA,
Fastformer) a row is how far the query's output depends on each token, which `layer.note` says.
"""

from linvit.figures.attention.capture import Seen, look, watchable
from linvit.figures.attention.layer import SeenLayer
from linvit.figures.attention.statistics import Rows

__all__ = ["Rows", "Seen", "SeenLayer", "look", "watchable"]
