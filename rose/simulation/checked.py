"""Figures of scenarios: dataclasses of these fields refuse others with pydantic.ValidationError."""

from typing import Annotated

from pydantic import ConfigDict, Field

CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrNone = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0)]
NotNegative = Annotated[float, Field(strict=True, ge=0)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
