"""Slow, independent references: Python floats and loops, written from the formulas, sharing nothing with the package.

A batch is a list of rows, a row a list of numbers; ``flat`` lays rows end to end, as the package has them.
"""

import math


def flat(rows):
    return [value for row in rows for value in row]


def cut(values, lengths):
    rows, at = [], 0
    for length in lengths:
        rows.append(list(values[at : at + length]))
        at += length
    return rows


def realized(energy, weights, kind):
    rows = []
    for i, row in enumerate(energy):
        own = [w * weights[i][t] ** 2 for t, w in enumerate(row)] if weights else row
        whole, sums = [math.fsum(own)] * len(own), [math.fsum(own[: t + 1]) for t in range(len(own))]
        rows.append({"cumulative": sums, "instantaneous": own, "uniform": [1.0] * len(own), "episode": whole}[kind])
    return rows


def otb(rewards, energy, group, *, kind="cumulative", leave_one_out=False, tail="zero", weights=None, pool=0.0):
    energies = realized(energy, weights, kind)
    to_go = [[math.fsum(row[t:]) for t in range(len(row))] for row in rewards]

    def taking_part(rows, t):
        """W and G at t of those rows that take part there, by row."""
        pairs = {j: (energies[j][t], to_go[j][t]) for j in rows if t < len(rewards[j])}
        if tail == "carry":
            pairs |= {j: (energies[j][-1], to_go[j][0]) for j in rows if t >= len(rewards[j])}
        return pairs

    result = []
    for i, row in enumerate(rewards):
        members = [j for j in range(len(rewards)) if group[j] == group[i] and rewards[j]]
        strangers = [j for j in range(len(rewards)) if group[j] != group[i] and rewards[j]] if pool else []
        out = []
        for t in range(len(row)):
            mine, others = taking_part(members, t), list(taking_part(strangers, t).values())
            counted = [pair for j, pair in mine.items() if not ((leave_one_out or pool == math.inf) and j == i)]
            if len(members) == 1 and not strangers:
                baseline = 0.0
            elif len(mine) == 1 and not others:
                baseline = to_go[i][t] if tail == "own" else 0.0
            elif others and pool == math.inf:
                baseline = math.fsum(w * g for w, g in others) / (math.fsum(w for w, _ in others) + 1e-8)
            else:
                mean = math.fsum(w for w, _ in others) / max(len(others), 1)
                of_pool = math.fsum(w * g for w, g in others) / math.fsum(w for w, _ in others) if mean else 0.0
                pseudo = pool * mean if others else 0.0
                baseline = math.fsum([*(w * g for w, g in counted), pseudo * of_pool])
                baseline /= math.fsum([*(w for w, _ in counted), pseudo]) + 1e-8
            out.append(to_go[i][t] - baseline)
        result.append(out)
    return result


def per_row(name, rewards, energy, group):
    """The estimators with one advantage per row, group_mean, grpo, rloo, opo, ogb, reinforce_pp; and none."""
    returns = [math.fsum(row) for row in rewards]
    tokens = [r for row, r in zip(rewards, returns, strict=True) for _ in row]
    result = []
    for i, row in enumerate(rewards):
        if name == "none":
            result.append([math.fsum(row[t:]) for t in range(len(row))])
            continue
        members = [j for j in range(len(rewards)) if group[j] == group[i] and rewards[j]]
        values = [returns[j] for j in members]
        alone = len(members) < 2
        if name == "reinforce_pp":
            mean = math.fsum(tokens) / max(len(tokens), 1)
            std = math.sqrt(math.fsum((r - mean) ** 2 for r in tokens) / max(len(tokens), 1))
            value = (returns[i] - mean) / (std + 1e-8)
        elif alone:
            value = returns[i]
        elif name in ("group_mean", "grpo"):
            mean = math.fsum(values) / len(values)
            std = math.sqrt(math.fsum((r - mean) ** 2 for r in values) / (len(values) - 1))
            value = (returns[i] - mean) / (1.0 if name == "group_mean" else std + 1e-6)
        elif name == "rloo":
            others = [returns[j] for j in members if j != i]
            value = returns[i] - math.fsum(others) / max(len(others), 1)
        else:
            weight = [len(rewards[j]) if name == "opo" else math.fsum(energy[j]) for j in members]
            eps = 0.0 if name == "opo" else 1e-8
            value = returns[i] - math.fsum(w * r for w, r in zip(weight, values, strict=True)) / (
                math.fsum(weight) + eps
            )
        result.append([value] * len(row))
    return result


def aggregate(losses, kind, max_tokens=None):
    rows = [row for row in losses if row]
    if not rows:
        return 0.0
    if kind == "seq_mean_token_mean":
        return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
    if kind == "token_mean":
        return math.fsum(flat(rows)) / len(flat(rows))
    if kind == "seq_mean_token_sum":
        return math.fsum(flat(rows)) / len(rows)
    return math.fsum(flat(rows)) / (len(rows) * max_tokens)


def clip(value, low, high):
    return max(low, min(value, high))


def surrogate(advantage, log_ratio, low, high, dual):
    """The written objective, with its max and min; and its derivative by log_ratio."""
    capped, log_ratio = log_ratio > 10.0, min(log_ratio, 10.0)
    plain, clipped = -advantage * math.exp(log_ratio), -advantage * math.exp(clip(log_ratio, low, high))
    loss, slope = (plain, plain) if plain >= clipped else (clipped, 0.0)
    if advantage < 0 and dual is not None and loss > -advantage * math.exp(dual):
        loss, slope = -advantage * math.exp(dual), 0.0
    return loss, 0.0 if capped else slope


def ctpo(steps, advantages, *, low=0.025, high=0.05, dual=0.05, power=0.5):
    """Loss and derivative by logp of each token, from d = logp − old of each row."""
    losses, slopes = [], []
    for row, credit in zip(steps, advantages, strict=True):
        total, loss_row, slope_row = 0.0, [], []
        for t, (d, a) in enumerate(zip(row, credit, strict=True), start=1):
            total += clip(d, -20.0, 20.0)
            scale = t**power
            loss, slope = surrogate(a, total, -low * scale, high * scale, None if dual is None else dual * scale)
            loss_row.append(loss)
            slope_row.append(slope)
        losses.append(loss_row)
        slopes.append(slope_row)
    return losses, slopes


def ppo(steps, advantages, *, low, high, dual=None):
    floor = math.log(1 - low) if low < 1 else -math.inf
    log_dual = None if dual is None else math.log(dual)
    pairs = [
        [surrogate(a, d, floor, math.log(1 + high), log_dual) for d, a in zip(row, credit, strict=True)]
        for row, credit in zip(steps, advantages, strict=True)
    ]
    return [[loss for loss, _ in row] for row in pairs], [[slope for _, slope in row] for row in pairs]


def cppo(logp, old, advantages, *, threshold=0.15, budget=0.015, floor=0.8):
    """Loss and derivative by logp of each token, by Algorithm 1 of arXiv 2606.10968 with D = |π − old|."""
    losses, slopes = [], []
    for new_row, old_row, credit in zip(logp, old, advantages, strict=True):
        moved = [abs(math.exp(new) - math.exp(past)) for new, past in zip(new_row, old_row, strict=True)]
        spent, width, loss_row = 0.0, 0.0, []
        for t, (new, past, a, far) in enumerate(zip(new_row, old_row, credit, moved, strict=True), start=1):
            weight = 1 - (1 - floor) / (len(moved) - 1) * (t - 1) if len(moved) > 1 else 1.0
            ratio = math.exp(clip(new - past, -20.0, 10.0))
            trained = a * (ratio - 1) <= 0 or weight * far <= min(threshold, threshold + budget * width - spent)
            loss_row.append(-a * ratio if trained else 0.0)
            spent, width = spent + weight * far, width + weight
        losses.append(loss_row)
        slopes.append(
            [0.0 if new - past > 10 else loss for new, past, loss in zip(new_row, old_row, loss_row, strict=True)]
        )
    return losses, slopes


def rejected(steps, bounds):
    """Whether each token is out of any of the bounds of its ratio, its row's product and geometric mean."""
    rows = []
    for row in steps:
        measured = {"token": row, "sequence": [math.fsum(row)] * len(row)}
        measured["geometric"] = [math.fsum(row) / len(row)] * len(row)
        rows.append([
            any(not low <= math.exp(measured[level][t]) <= high for level, (low, high) in bounds.items())
            for t in range(len(row))
        ])  # fmt: skip
    return rows
