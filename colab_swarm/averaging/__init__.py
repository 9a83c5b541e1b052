"""DeDLOC's averaging: groups, spans, the streaming reducer, one round. See README.md in this folder."""
