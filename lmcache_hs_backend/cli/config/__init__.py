"""``check-config``: would the plugin load with a configuration, and do what is meant?"""
