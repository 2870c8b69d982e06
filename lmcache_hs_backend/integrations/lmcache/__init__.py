"""The storage plugin for LMCache's in-process engine. The only code here that imports lmcache."""
