"""StrictModel: pydantic models that say what a wrong keyword should have been."""

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class StrictModel(BaseModel):
    """Refuses keywords that it does not have, with the nearest one and a list of all.

    Errors do not show the input: it would be models and loaders in full, and hide the sentence.
    """

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _only_known_keywords(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = set(cls.model_fields)
        for field in cls.model_fields.values():
            known.update(getattr(field.validation_alias, "choices", ()))
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"{cls.__name__} has no argument {name!r}{hint} "
                    f"(it has {', '.join(sorted(known))})"
                )
        return values
