"""PNG plots of a run."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

# Okabe and Ito's palette: told apart by the colour-blind, and in grey.
COLORS = ("#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
# A second and third use of the colours: other lines, other marks, also at the labels.
_STYLES = (("-", "o", ""), ("--", "s", "■ "), ("-.", "^", "▲ "))
_MOST_CLIENTS_DRAWN = 100
_PANELS_A_ROW = 5
# Of all labels at an axis, side by side, as wide as a panel of bars.
_LETTERS_ACROSS = 70


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def accuracy_over_rounds(
    path: Path,
    curves: Mapping[str, tuple[Sequence[int], Sequence[float], Sequence[float]]],
    title: str,
) -> None:
    """Pooled accuracy over rounds, one line an algorithm.

    Args:
      path: of the PNG.
      curves: for each algorithm: rounds, pooled accuracy, accuracy of the worst tenth
        of the clients (drawn dotted, where there are as many colours as algorithms).
      title: above the plot.
    """
    figure, axes = plt.subplots(figsize=(8, 4.5))
    ends = []
    with_worst = len(curves) <= len(COLORS)
    for number, (name, (rounds, pooled, worst)) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        line, mark, sign = _STYLES[number // len(COLORS) % len(_STYLES)]
        percent = 100 * np.asarray(pooled)
        marker = mark if len(percent) < 30 else None
        axes.plot(rounds, percent, color=color, lw=2, ls=line, marker=marker, ms=3.5)
        if with_worst:
            axes.plot(rounds, 100 * np.asarray(worst), color=color, lw=1, ls=":")
        ends.append((percent[-1], sign + name, color))
    for place, (value, name, color) in zip(
        _spread([value for value, *_ in sorted(ends)], gap=4.5),
        sorted(ends),
        strict=True,
    ):
        axes.annotate(
            f"{name} {value:.1f}",
            (1.01, place),
            xycoords=("axes fraction", "data"),
            color=color,
            va="center",
            annotation_clip=False,
        )
    axes.set(xlabel="round", ylabel="accuracy, %", ylim=(0, 102), title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.text(
        0.0,
        -0.2,
        "solid: all test examples pooled    dotted: worst tenth of the clients"
        if with_worst
        else "all test examples pooled",
        transform=axes.transAxes,
        fontsize=8,
        color="0.35",
    )
    _plain(axes)
    _save(figure, path)


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """Ascending places for labels near their values, at least `gap` apart."""
    places: list[float] = []
    for value in values:
        places.append(max(value, places[-1] + gap) if places else value)
    overshoot = max(0.0, places[-1] - 100) if places else 0.0
    for i in reversed(range(len(places))):
        ceiling = places[i + 1] - gap if i + 1 < len(places) else 100.0
        places[i] = min(places[i], ceiling) if overshoot else places[i]
    return places


def client_accuracies(
    path: Path, accuracies: Mapping[str, Float[np.ndarray, " clients"]]
) -> None:
    """Accuracy of every client, sorted from worst to best, one panel an algorithm."""
    columns = min(len(accuracies), _PANELS_A_ROW)
    lines = -(-len(accuracies) // columns)
    figure, panels = plt.subplots(
        lines,
        columns,
        figsize=(2.6 * columns + 1, 3.2 * lines),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for unused in panels.flat[len(accuracies) :]:
        unused.set_visible(False)
    for color, axes, (name, values) in zip(
        COLORS * len(accuracies), panels.flat, accuracies.items(), strict=False
    ):
        shown = 100 * np.sort(values[~np.isnan(values)])
        axes.bar(np.arange(len(shown)), shown, color=color, width=0.85)
        axes.axhline(shown.mean(), color="0.2", lw=1)
        axes.set_title(f"{name}\nmean {shown.mean():.1f}", fontsize=10)
        axes.set(xlabel="clients, worst to best", xticks=[], ylim=(0, 102))
        _plain(axes)
    panels[0, 0].set_ylabel("test accuracy, %")
    _save(figure, path)


def label_distribution(
    path: Path, counts: Int[np.ndarray, "clients classes"], class_names: Sequence[str]
) -> None:
    """Training examples of each class at each client, as stacked bars."""
    counts = counts[:_MOST_CLIENTS_DRAWN]
    width = max(6.0, min(14.0, 0.16 * len(counts) + 3))
    figure, axes = plt.subplots(figsize=(width, 3.6))
    num_classes = counts.shape[1]
    colors = plt.get_cmap("tab20" if num_classes > 10 else "tab10")
    bottom = np.zeros(len(counts))
    for label in range(num_classes):
        axes.bar(
            np.arange(len(counts)),
            counts[:, label],
            bottom=bottom,
            width=0.9,
            color=colors(label % colors.N),
            label=class_names[label] if num_classes <= 20 else None,
        )
        bottom += counts[:, label]
    axes.set(
        xlabel="client", ylabel="training examples", xlim=(-0.7, len(counts) - 0.3)
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if num_classes <= 20:
        axes.legend(
            title="class", bbox_to_anchor=(1.01, 1), loc="upper left", fontsize=8
        )
    _plain(axes)
    _save(figure, path)


def comparison(
    path: Path, groups: Mapping[str, Mapping[str, tuple[float, float]]]
) -> None:
    """Accuracy of every algorithm, best on top, one panel a group.

    Args:
      path: of the PNG.
      groups: for each data set and partition, for each algorithm: mean and standard
        deviation over seeds, as shares.
    """
    longest = max(map(len, groups.values()))
    figure, panels = plt.subplots(
        1,
        len(groups),
        figsize=(4.6 * len(groups) + 1, 0.24 * longest + 1.3),
        squeeze=False,
        layout="constrained",
    )
    for axes, (group, found) in zip(panels.flat, groups.items(), strict=True):
        ranked = sorted(found.items(), key=lambda item: item[1][0])
        for place, (_, (mean, std)) in enumerate(ranked):
            color = COLORS[0] if place == len(ranked) - 1 else "0.4"
            axes.errorbar(
                100 * mean, place, xerr=100 * std, fmt="o", color=color, ms=4, capsize=2
            )
        axes.set_yticks(range(len(ranked)), [name for name, _ in ranked], fontsize=8)
        axes.set(xlabel="accuracy, %", ylim=(-0.7, len(ranked) - 0.3))
        axes.set_title(group, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
    _save(figure, path)


def joining_curves(
    path: Path,
    panels: Mapping[str, Mapping[str, tuple[Sequence[int], Sequence[float]]]],
) -> None:
    """Accuracy of new clients over the steps they fit, one panel a number of examples.

    Args:
      path: of the PNG.
      panels: for each title, for each way to join: steps and accuracy.
    """
    figure, all_axes = plt.subplots(
        1,
        len(panels),
        figsize=(3.4 * len(panels) + 0.6, 4.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, (title, curves) in zip(all_axes.flat, panels.items(), strict=True):
        for number, (name, (steps, accuracy)) in enumerate(curves.items()):
            style, mark, _ = _STYLES[number // len(COLORS) % len(_STYLES)]
            axes.plot(
                steps,
                100 * np.asarray(accuracy),
                color=COLORS[number % len(COLORS)],
                ls=style,
                marker=mark,
                ms=3.5,
                label=name,
            )
        axes.set_xscale("symlog", linthresh=1)
        axes.set(xlabel="steps", ylim=(0, 102))
        axes.set_title(title, fontsize=10)
        _plain(axes)
    all_axes[0, 0].set_ylabel("accuracy of the new clients, %")
    handles, labels = all_axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(4, len(labels)),
        fontsize=8,
        frameon=False,
    )
    _save(figure, path)


def map_distances(
    path: Path, by_pair: Mapping[str, Sequence[float]], ylabel: str
) -> None:
    """A figure of attention maps over layers, one line a pair of models.

    Args:
      path: of the PNG.
      by_pair: for each pair, a value a layer.
      ylabel: what the values are.
    """
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for color, (name, values) in zip(COLORS, by_pair.items(), strict=False):
        layers = np.arange(1, len(values) + 1)
        axes.plot(layers, values, "o-", color=color, label=name)
    axes.set(xlabel="layer", ylabel=ylabel, ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)
    _plain(axes)
    _save(figure, path)


def rollouts(
    path: Path,
    images: Float[np.ndarray, "images height width channels"],
    by_model: Mapping[str, Float[np.ndarray, "images rows columns"]],
    labels: Sequence[str],
) -> None:
    """Where each model looks: attention rollout over a few images, a row a model.

    Args:
      path: of the PNG.
      images: with values 0 to 1.
      by_model: for each model, attention of each patch.
      labels: above the images.
    """
    figure, panels = plt.subplots(
        len(by_model) + 1,
        len(images),
        figsize=(1.35 * len(images) + 0.8, 1.4 * (len(by_model) + 1)),
        squeeze=False,
        layout="constrained",
    )
    height, width = images.shape[1:3]
    for column, (image, label) in enumerate(zip(images, labels, strict=True)):
        grey = image.mean(axis=-1)
        panels[0, column].imshow(grey, cmap="gray", vmin=0, vmax=1)
        panels[0, column].set_title(label, fontsize=8)
        for row, heat in enumerate(by_model.values(), 1):
            axes = panels[row, column]
            axes.imshow(grey, cmap="gray", vmin=0, vmax=1)
            axes.imshow(
                heat[column],
                cmap="inferno",
                alpha=0.6,
                extent=(-0.5, width - 0.5, height - 0.5, -0.5),
                interpolation="bilinear",
            )
    for row, name in enumerate(["image", *by_model]):
        panels[row, 0].set_ylabel(name, fontsize=9)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
    _save(figure, path)


def cost_of_rounds(
    path: Path,
    by_clients: Mapping[str, Mapping[int, float]],
    by_cohort: Mapping[int, float],
    by_skew: Mapping[str, tuple[float, float]],
) -> None:
    """What a round costs, in three panels.

    Args:
      path: of the PNG.
      by_clients: for each algorithm, seconds a round by the number of clients.
      by_cohort: images a second by the number of clients in a round.
      by_skew: for each way sizes are spread, time over the bound: ours, with padding.
    """
    figure, (clients, cohort, skew) = plt.subplots(1, 3, figsize=(12, 3.4))
    for color, (name, times) in zip(COLORS, by_clients.items(), strict=False):
        clients.plot(
            list(times),
            [1000 * t for t in times.values()],
            "o-",
            color=color,
            label=name,
        )
    clients.set(xscale="log", xlabel="clients", ylabel="ms a round", ylim=(0, None))
    clients.set_title("a round of 10 clients, out of so many", fontsize=10)
    clients.legend(frameon=False, fontsize=8)
    cohort.plot(list(by_cohort), list(by_cohort.values()), "o-", color=COLORS[0])
    cohort.set(xlabel="clients in a round", ylabel="images/s", ylim=(0, None))
    cohort.set_xscale("log", base=2)
    cohort.set_title("all clients of a round at a time", fontsize=10)
    places = np.arange(len(by_skew))
    for shift, color, label, which in (
        (-0.2, COLORS[0], "lanes", 0),
        (0.2, COLORS[1], "padded to the longest", 1),
    ):
        ratios = [pair[which] for pair in by_skew.values()]
        bars = skew.bar(places + shift, ratios, 0.38, color=color, label=label)
        skew.bar_label(bars, fmt="%.3g", fontsize=8)
    skew.set(
        xticks=places, xticklabels=list(by_skew), yscale="log", ylabel="time / bound"
    )
    skew.axhline(1, color="0.2", lw=1)
    skew.set_title("64 clients of unequal sizes", fontsize=10)
    skew.legend(
        frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1)
    )
    for axes in (clients, cohort, skew):
        _plain(axes)
    figure.tight_layout()
    _save(figure, path)


def quantization(
    path: Path,
    full: float,
    by_bits: Mapping[str, Mapping[int, float]],
    by_share: Mapping[str, Mapping[float, float]],
    score: str,
) -> None:
    """A score with quantized attention: against bits, and against the share pruned.

    Args:
      path: of the PNG.
      full: the score at full precision; scores are 0 to 1.
      by_bits: for each kind of code, the score by bits.
      by_share: for each way to prune, the score by the share pruned.
      score: what it is.
    """
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 3.6), sharey=True, layout="constrained"
    )
    for color, (name, scores) in zip(COLORS, by_bits.items(), strict=False):
        left.plot(
            list(scores),
            [100 * s for s in scores.values()],
            "o-",
            color=color,
            label=name,
        )
    for color, (name, curve) in zip(COLORS[2:], by_share.items(), strict=False):
        shares = sorted(curve)
        right.plot(
            [100 * share for share in shares],
            [100 * curve[share] for share in shares],
            "o-",
            color=color,
            label=name,
        )
    left.set(xlabel="bits of a code", ylabel=f"{score}, %")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set(xlabel="attention values pruned, %")
    for axes in (left, right):
        axes.axhline(100 * full, color="0.4", lw=1, ls="--", label="full precision")
        axes.legend(frameon=False, fontsize=8)
        _plain(axes)
    _save(figure, path)


def by_head(path: Path, shares: Float[np.ndarray, "layers heads"], title: str) -> None:
    """A heat map of the share of attention values that are pruned, by layer and head.

    Args:
      path: of the PNG.
      shares: 0 to 1.
      title: of the picture.
    """
    layers, heads = shares.shape
    figure, axes = plt.subplots(
        figsize=(1.8 + 0.5 * heads, 1.4 + 0.4 * layers), layout="constrained"
    )
    image = axes.imshow(100 * shares, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    for layer in range(layers):
        for head in range(heads):
            share = shares[layer, head]
            axes.text(
                head,
                layer,
                f"{100 * share:.0f}",
                ha="center",
                va="center",
                fontsize=8,
                color="black" if share > 0.6 else "white",
            )
    axes.set(
        xticks=range(heads),
        yticks=range(layers),
        xticklabels=range(1, heads + 1),
        yticklabels=range(1, layers + 1),
        xlabel="head",
        ylabel="layer",
    )
    axes.set_title(title, fontsize=9)
    figure.colorbar(image, ax=axes, label="pruned, %")
    _save(figure, path)


def attention_values(
    path: Path,
    edges: Float[np.ndarray, " edges"],
    by_layer: Float[np.ndarray, "layers bins"],
    cut: float,
) -> None:
    """How attention values are distributed, a line a layer, on a logarithmic scale.

    Args:
      path: of the PNG.
      edges: of the bins; values.
      by_layer: the share of a layer's values in each bin.
      cut: a threshold to be shown.
    """
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    colors = plt.colormaps["viridis"](np.linspace(0, 0.9, len(by_layer)))
    for layer, (color, shares) in enumerate(zip(colors, by_layer, strict=True), 1):
        axes.stairs(100 * shares, edges, color=color, label=f"layer {layer}", lw=1.5)
    axes.axvline(cut, color="0.4", lw=1, ls="--", label=f"{cut:g}")
    axes.set(xscale="log", xlabel="attention value", ylabel="share of values, %")
    axes.legend(frameon=False, fontsize=8)
    _plain(axes)
    _save(figure, path)


Numbers = Sequence[float] | np.ndarray
Lines = Mapping[str, tuple[Numbers, Numbers]]


def lines(
    path: Path,
    panels: Mapping[str, Lines],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    zero_line: bool = False,
) -> None:
    """Labelled lines, one panel beside the other, all to one scale.

    Args:
      path: of the PNG.
      panels: for each title, for each label: the points' places and values.
      x, y: what the axes show.
      log_x, log_y: logarithmic axes.
      zero_line: draw one at 0.
    """
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4.4 * len(panels) + 1.2, 3.8),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, (title, found) in zip(axes.flat, panels.items(), strict=True):
        for number, (label, (places, values)) in enumerate(found.items()):
            line, mark, _ = _STYLES[number // len(COLORS) % len(_STYLES)]
            panel.plot(
                places,
                values,
                color=COLORS[number % len(COLORS)],
                ls=line,
                marker=mark if len(places) < 30 else None,
                ms=3.5,
                lw=1.6,
                label=label,
            )
        if zero_line:
            panel.axhline(0, color="0.4", lw=0.8)
        if log_x:
            panel.set_xscale("log")
            _name_few(panel, {x for places, _ in found.values() for x in places})
        if log_y:
            panel.set_yscale("log")
        panel.set(xlabel=x)
        panel.set_title(title, fontsize=10)
        panel.legend(fontsize=8, frameon=False)
        _plain(panel)
    axes[0, 0].set_ylabel(y)
    _save(figure, path)


def _name_few(axes: Axes, places: Collection[float]) -> None:
    """Writes a few whole numbers at a logarithmic axis as they are."""
    if len(places) <= 6 and all(1 <= x < 1e5 and x == int(x) for x in places):
        axes.set_xticks(sorted(places), [f"{x:g}" for x in sorted(places)])
        axes.xaxis.set_minor_locator(NullLocator())


def heat(
    path: Path,
    panels: Mapping[str, Float[np.ndarray, "rows columns"]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    x: str,
    y: str = "",
    label: str,
    diverging: bool = False,
) -> None:
    """Matrices as colours, one panel beside the other, all to one scale.

    Args:
      path: of the PNG.
      panels: a matrix for each title.
      rows, columns: names, from the top and from the left.
      x, y: what columns and rows are.
      label: of the colours.
      diverging: colours that tell negative from positive.
    """
    shown = np.concatenate([np.ravel(found) for found in panels.values()])
    shown = shown[np.isfinite(shown)]
    largest = float(np.abs(shown).max(initial=0.0)) or 1.0
    lowest = -largest if diverging else float(shown.min(initial=0.0))
    width = 0.32 * len(columns) + 1.2
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(width * len(panels) + 2.4, 0.2 * len(rows) + 1.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, (title, found) in zip(axes.flat, panels.items(), strict=True):
        image = panel.imshow(
            found,
            aspect="auto",
            cmap="RdBu_r" if diverging else "viridis",
            vmin=lowest,
            vmax=largest,
        )
        panel.set_xticks(range(len(columns)), columns, fontsize=7, rotation=90)
        panel.set_yticks(range(len(rows)), rows, fontsize=7)
        panel.set(xlabel=x)
        panel.set_title(title, fontsize=10)
    axes[0, 0].set_ylabel(y)
    figure.colorbar(image, ax=axes, label=label)
    _save(figure, path)


def heterogeneity(
    path: Path,
    emd: Float[np.ndarray, " clients"],
    classes: Float[np.ndarray, " clients"],
    sizes: Int[np.ndarray, " clients"],
) -> None:
    """How far each client's labels are from all, how many classes it has, and how much.

    Args:
      path: of the PNG.
      emd: earth mover's distance of each client; NaN for one without examples.
      classes: effective classes of each client; NaN likewise.
      sizes: examples of each client.
    """
    figure, panels = plt.subplots(1, 3, figsize=(10, 2.9), layout="constrained")
    most = max(2, int(np.ceil(np.nanmax(classes))))
    shown = (
        (emd, "earth mover's distance to all", np.linspace(0, 2, 21)),
        (classes, "effective classes", np.linspace(1, most, 21)),
        (sizes, "training examples", 20),
    )
    for axes, color, (values, name, bins) in zip(panels, COLORS, shown, strict=False):
        axes.hist(values[~np.isnan(values)], bins=bins, color=color)
        axes.set(xlabel=name)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        _plain(axes)
    panels[0].set_ylabel("clients")
    _save(figure, path)


def bars(
    path: Path,
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    y: str,
    line: float | None = None,
) -> None:
    """Groups of bars, one panel above the other.

    Args:
      path: of the PNG.
      panels: for each title, for each label (a colour), for each group the height.
      y: what heights are.
      line: drawn across at this height.
    """
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(7.5, 2.7 * len(panels) + 0.4),
        squeeze=False,
        layout="constrained",
    )
    for panel, (title, found) in zip(axes.flat, panels.items(), strict=True):
        groups = list(dict.fromkeys(name for own in found.values() for name in own))
        width = 0.84 / len(found)
        for number, (label, own) in enumerate(found.items()):
            places = [groups.index(name) + (number + 0.5) * width for name in own]
            panel.bar(
                np.array(places) - 0.42,
                list(own.values()),
                width,
                color=COLORS[number % len(COLORS)],
                label=label,
            )
        if line is not None:
            panel.axhline(line, color="0.3", lw=0.9)
        panel.set_xticks(range(len(groups)), groups)
        if sum(map(len, groups)) > _LETTERS_ACROSS:
            plt.setp(panel.get_xticklabels(), rotation=30, ha="right")
        panel.set(ylabel=y)
        panel.set_title(title, fontsize=10)
        if any(found):
            panel.legend(fontsize=8, frameon=False, ncols=len(found))
        _plain(panel)
    _save(figure, path)


def image_rows(
    path: Path,
    rows: Mapping[str, Float[np.ndarray, "images height width channels"]],
    span: tuple[float, float],
) -> None:
    """Images side by side, a labelled row each.

    Args:
      path: of the PNG.
      rows: as many images in each.
      span: the values of black and white.
    """
    columns = len(next(iter(rows.values())))
    figure, axes = plt.subplots(
        len(rows),
        columns,
        figsize=(0.9 * columns + 2.6, 0.9 * len(rows)),
        squeeze=False,
        layout="constrained",
    )
    low, high = span
    for line, (label, images) in zip(axes, rows.items(), strict=True):
        for axis, image in zip(line, images, strict=True):
            shown = np.clip((image - low) / ((high - low) or 1.0), 0, 1)
            shown = shown[..., 0] if shown.shape[-1] != 3 else shown
            axis.imshow(shown, cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    _save(figure, path)
