"""Who may take part in a run, and what each peer contributed.

See README.md in this folder, and ONE_MEMBER.md on what a single hostile member can do.
"""
