"""What every rank will see, what is wrong with it, and what the ranks did see."""

from nvalchemi.sharding.compare import Comparison
from nvalchemi.sharding.finding import Finding
from nvalchemi.sharding.plan import ShardPlan
from nvalchemi.sharding.record import Record, ShardRecorder, load_record

__all__ = ["Comparison", "Finding", "Record", "ShardPlan", "ShardRecorder", "load_record"]
