"""`stretto check`: is this model integrated, and if not, which parameter is wrong."""

from stretto.orchestration.check.launch import check
from stretto.orchestration.check.report import Report
from stretto.orchestration.check.settings import ENGINES, TRAINERS, CheckSettings

__all__ = ["ENGINES", "TRAINERS", "CheckSettings", "Report", "check"]
