"""Work units (VC-ASGD): training by volunteers that only make plain HTTPS requests. See README.md here."""

from colab_swarm.workunits.coordinator import coordinate
from colab_swarm.workunits.job import Job, WorkPlan
from colab_swarm.workunits.messages import Resources
from colab_swarm.workunits.volunteering import volunteer

__all__ = ["Job", "Resources", "WorkPlan", "coordinate", "volunteer"]
