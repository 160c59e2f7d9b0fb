"""Whether a profile belongs to a model.

In: a profile and a model. Out: yes or no, or an error that names what differs.
"""

from __future__ import annotations

from packhorse.errors import MismatchError
from packhorse.model.spec import Model
from packhorse.profile.spec import Profile


def fits_model(profile: Profile, model: Model) -> bool:
    """Whether the times are those of this model at this micro-batch shape."""
    return _find_difference(profile, model) is None


def check_profile(profile: Profile, model: Model) -> None:
    """Refuse a profile of another model or micro-batch shape.

    Raises:
        MismatchError: says what the profile has and what the model has.
    """
    difference = _find_difference(profile, model)
    if difference is not None:
        raise MismatchError(
            f"the profile does not belong to this model: {difference}",
            where=f"model {model.name}",
            fix="profile this model at this micro-batch shape",
        )


def _find_difference(profile: Profile, model: Model) -> str | None:
    if profile.model != model.fingerprint:
        return f"it is of model {profile.model}, this is {model.fingerprint}"
    if (profile.rows, profile.length) != (model.rows, model.length):
        return (
            f"its micro-batches are {profile.rows} x {profile.length},"
            f" those of the model {model.rows} x {model.length}"
        )
    return None
