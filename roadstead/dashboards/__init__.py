"""What people look at: pages, panels and alerts, each made from what a run left or says."""
