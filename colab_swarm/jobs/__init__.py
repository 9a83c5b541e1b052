"""The face of work units: coordinate a job, volunteer for one."""
