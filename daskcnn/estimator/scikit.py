"""scikit-learn's base classes and checks where it is installed, and what stands for them where it is not."""

from __future__ import annotations

import inspect
from typing import Any, Self

import numpy as np
import numpy.typing as npt

try:
    from sklearn.base import BaseEstimator as BaseEstimator
    from sklearn.base import ClassifierMixin as ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data

    INSTALLED = True
except ModuleNotFoundError:
    INSTALLED = False

if not INSTALLED:

    class BaseEstimator:  # type: ignore[no-redef] # defined here only where the import above failed
        """Parameters by name, as scikit-learn's class of this name has them."""

        def get_params(self, deep: bool = True) -> dict[str, Any]:
            """Return the parameters by name."""
            return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

        def set_params(self, **params: Any) -> Self:
            """Set parameters by name."""
            for name, value in params.items():
                if name not in self.get_params():
                    raise ValueError(f"Invalid parameter {name!r} for {type(self).__name__}")
                setattr(self, name, value)
            return self

        def __repr__(self) -> str:
            defaults = inspect.signature(type(self)).parameters
            own = {name: value for name, value in self.get_params().items() if value is not defaults[name].default}
            return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in own.items())})"

    class ClassifierMixin:  # type: ignore[no-redef] # as BaseEstimator
        """The score of a classifier, as scikit-learn's class of this name has it."""

        def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
            """Return the accuracy on these samples."""
            right = np.asarray(self.predict(X)) == np.asarray(y)  # type: ignore[attr-defined] # a mixin of what has it
            return float(np.average(right, weights=sample_weight))


def checked_array(estimator: Any, X: Any, *, reset: bool) -> npt.NDArray[Any]:
    """X as a finite array of numbers: two-dimensional, or images. reset: whether it decides `n_features_in_`."""
    if INSTALLED and not _is_images(X):
        return validate_data(estimator, X, reset=reset)
    if INSTALLED:
        return check_array(X, ensure_2d=False, allow_nd=True, input_name="X", estimator=estimator)
    found = np.asarray(X)
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError("Input X contains NaN or infinity")
    return found


def _is_images(X: Any) -> bool:
    shape = np.shape(X) if isinstance(X, list | tuple) else getattr(X, "shape", ())
    return len(shape) > 2


def checked_labels(estimator: Any, y: Any) -> npt.NDArray[Any]:
    """Labels as a one-dimensional array."""
    if y is None:
        raise ValueError(f"This {type(estimator).__name__} estimator requires y to be passed, but the target y is None")
    if not INSTALLED:
        given = np.asarray(y)
        if given.ndim != 1 and given.shape[1:] != (1,):
            raise ValueError(f"y has shape {given.shape}: give one label for each sample, (N,)")
        return given.reshape(-1)
    found = column_or_1d(y, warn=True)
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError("Input y contains NaN or infinity")
    check_classification_targets(found)
    return found


def require_fitted(estimator: Any) -> None:
    """Raise the error of an estimator that is used before `fit`."""
    if INSTALLED:
        check_is_fitted(estimator, "model_")
    elif not hasattr(estimator, "model_"):
        raise ValueError(f"This {type(estimator).__name__} instance is not fitted yet; call fit first")
