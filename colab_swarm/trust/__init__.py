"""Who may take part in a run, and what each peer gave. README.md here, and ONE_MEMBER.md: what one member can do."""
