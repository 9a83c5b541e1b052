"""What a pretrained model is good for: fine-tune it to tag words or to classify texts (DeDLOC, table 2)."""
