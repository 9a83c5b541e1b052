"""SwAV: image features without labels, by predicting the cluster of one view from another (DeDLOC, section 4.1)."""
