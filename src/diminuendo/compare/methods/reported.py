"""What each method's own paper reports, and how far the comparison can be held against it.

Only what the papers or their repositories say themselves; a method that is not here was not
compared with its paper. None of these settings is the comparison's: fewer examples, features of
8×8 blocks, a linear model or a small network, and an exact account.
"""

from __future__ import annotations

NOT_COMPARED = "not compared with the figures of its paper."
_THEORY = "A paper of theory: rates and proofs, no experiments to compare with."
_OURS = "This library's own; no paper's figure to compare with."

REPORTED: dict[str, str] = {
    "uniform": "MNIST with 60 principal components and 1,000 hidden units: 90, 95 and 97% at "
    "ε = 0.5, 2 and 8, δ = 1e-5, on 60,000 examples (Abadi et al., section 5).",
    "uniform-falling": "Customary; no paper's figure to compare with.",
    "uniform-whitened": "Scattering features and a linear model at (3, 1e-5), normalised: 98.7% on "
    "MNIST, 89.7% on Fashion-MNIST, 67.0% on CIFAR-10 (the repository of Tramèr and Boneh); beside "
    "ours on the page of evidence.",
    "uniform-momentum": "CIFAR-10 without other data: 81.4% at (8, 1e-5), with a WRN-40-4, large "
    "batches, several augmentations of each image and averaged parameters (De et al., abstract).",
    "adam-corrected": "More accuracy than DP-Adam on image, text and graph tasks (abstract); no "
    "figure to compare with.",
    "optimal": "MNIST35 and MNIST by N, in its figure: reproduced by `diminuendo reproduce`, on "
    "the page of evidence.",
    "exponential": "The same figure as the optimal schedule's.",
    "optimal-momentum": _OURS,
    "joint": _OURS,
    "correlated-influence": _OURS,
    "banded-influence": _OURS,
    "adaptive-share": "Logistic regression and support vector machines on real tables, as curves "
    "over ε; no single figure to compare with.",
    "adadp": "MNIST at ε = 0.5 and 0.1 with σ = 8 and lots of 600, as curves (the repository "
    "AdaDP).",
    "learned-policy": "More utility than hand-made protection at the same budget, on synthetic and "
    "real data unlike those it learnt on (abstract); no figure to compare with.",
    "learned-schedule": "The repository's README reports no accuracies.",
    "quantile": "Federated tasks, users as units: clipping at the median does well on all of them, "
    "sometimes better than the best fixed clip norm in hindsight (abstract).",
    "auto-s": "As good as the best tuned clip norm on language and image tasks, with one number "
    "less to tune (abstract).",
    "per-layer": "Recurrent language models with users as units, at little cost in accuracy where "
    "users are many (abstract).",
    "small-batches": "As for uniform noise: Abadi et al. sampled.",
    "batches-heavy-ball": "Scattering features and a small CNN at (3, 1e-5): 98.7% on MNIST, 89.0% "
    "on Fashion-MNIST, 69.3% on CIFAR-10; the CNN on whole images 98.1, 86.0 and 59.2% (their "
    "repository). Those for MNIST and Fashion-MNIST are beside ours on the page of evidence.",
    "large-batches": "BERT-Large: 60.5% of masked words right at ε = 5.36 with batches of two "
    "million (Anil et al., abstract).",
    "snowball": _THEORY,
    "stochastic-convex": _THEORY,
    "phased-sgd": _THEORY,
    "output": "Adult and KDDCup99, as curves over pure ε; objective perturbation is better than "
    "output perturbation (abstract).",
    "objective": "Adult and KDDCup99, as curves over pure ε; objective perturbation is better than "
    "output perturbation (abstract).",
    "bolt-on": "Up to four times the accuracy of earlier private descent at the same budget "
    "(abstract).",
    "correlated-prefix": "Prefix sums: errors within a small constant of the best possible "
    "(Fichtenberger et al.).",
    "correlated-pole": "Prefix sums: nearly the best error with few buffers (abstract).",
    "banded-prefix": "Federated and central training: as good as or better than DP-SGD and earlier "
    "factorisations at all budgets (abstract), as curves.",
}

CHECKED: dict[str, str] = {
    "auto-s": "that it is flat clipping where all gradients are longer than the clip norm, that "
    "its clip norm can be taken into the learning rate, and that four learning rates come within "
    "2.5 points of the best of twelve pairs of clip norm and learning rate, in the tests",
    "objective": "that it does better than output perturbation at the same budget for every "
    "regularisation, and its δ by another quadrature, in the tests",
    "adam-corrected": "that its second moment is that of the gradient without noise, in the tests",
    "uniform": "the account: ε of the same steps by two other accountants, in the tests",
    "banded-prefix": "that an example's steps share no row, and that the factor's error is below "
    "that of the square root, in the tests",
    "banded-influence": "that the factor's noise in the final loss is below that of the factor for "
    "prefix sums, in the tests",
    "learned-schedule": "that what was learnt lowers the loss of new runs on other data, in the "
    "tests",
    "learned-policy": "that what was learnt lowers the loss of new runs on other data, in the "
    "tests",
    "adadp": "that coordinates with larger gradients get more noise, in the tests",
}
